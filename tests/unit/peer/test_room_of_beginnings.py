"""What a peer keeps of beginnings of prompts is in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from edge.memory.ledger import Baseline, Ledger, Use
from edge.offload import PrefixMemory, PrefixPart
from edge.peer.access import UserLimits
from edge.peer.resources import PeerResources
from edge.peer.settings import PeerSettings
from edge.transport import Member

MIB = 1 << 20
ROOM_BYTES = 64 * MIB
ONE = Member(id="a" * 32, name="kitchen", roles=frozenset(), edition=0)


def with_resources(
    folder: Path,
    then: Callable[[PeerResources, PrefixMemory], Awaitable[None]],
    *,
    kv_memory_bytes: int | None = None,
    each_user: UserLimits | None = None,
) -> None:
    async def main() -> None:
        settings = PeerSettings(
            name="p",
            listen="127.0.0.1:0",
            threads=1,
            announce=False,
            backend="null",
            cache_root=folder,
            cache_limit_bytes=1 << 20,
            kv_memory_bytes=kv_memory_bytes,
            each_user=each_user,
        )
        resources = PeerResources(settings, None)
        await resources.open()
        baseline = Baseline(process_bytes=0, work_bytes=0)
        resources._change(Ledger(budget_bytes=ROOM_BYTES, baseline=baseline))
        await then(resources, resources.kv_room.beginnings)
        await resources.aclose()

    asyncio.run(main())


def has(memory: PrefixMemory, name: str) -> bool:
    return bool(memory.find(name, PrefixPart.of("x")))


def keep(memory: PrefixMemory, names: str, owner: str = "") -> str:
    """A MiB by each name; those that are there in the end."""
    for name in names:
        memory.put(name, {"x": np.zeros(MIB, np.uint8)}, owner=owner)
    return "".join(name for name in names if has(memory, name))


def test_half_of_what_nobody_needs_is_for_them(tmp_path: Path) -> None:
    """Whoever asks for memory gets it as if there were none."""

    async def then(resources: PeerResources, memory: PrefixMemory) -> None:
        assert keep(memory, "abcdefgh") == "abcdefgh"
        described = resources.describe()
        assert described.kv_beginnings_bytes == 8 * MIB
        assert described.free_bytes == ROOM_BYTES
        await resources.reserve("load", Use(weight_bytes=ROOM_BYTES - 10 * MIB))
        assert memory.used_bytes == 5 * MIB
        async with resources.room_to_load(4 * MIB):
            assert memory.used_bytes == 3 * MIB
        assert has(memory, "h")
        await resources.reserve("other", Use(weight_bytes=10 * MIB))
        assert memory.used_bytes == 0
        resources.release("load")
        assert keep(memory, "abc") == "abc"
        resources.leaving.set()
        resources.fit_beginnings()
        assert memory.used_bytes == 0

    with_resources(tmp_path, then)


def test_no_more_than_half_of_what_keys_and_values_may_take(tmp_path: Path) -> None:
    async def then(_resources: PeerResources, memory: PrefixMemory) -> None:
        assert keep(memory, "abcd") == "cd"

    with_resources(tmp_path, then, kv_memory_bytes=4 * MIB)


def test_they_count_as_what_one_device_has_loaded(tmp_path: Path) -> None:
    async def then(resources: PeerResources, memory: PrefixMemory) -> None:
        await resources.reserve("load", Use(weight_bytes=8 * MIB), ONE)
        assert keep(memory, "abcd", ONE.id) == "cd"
        assert keep(memory, "efgh") == "efgh"
        await resources.reserve("more", Use(weight_bytes=2 * MIB), ONE)
        assert memory.used_bytes == 4 * MIB
        resources.release("load")
        assert keep(memory, "abcd", ONE.id) == "abcd"

    with_resources(tmp_path, then, each_user=UserLimits(memory_bytes=10 * MIB))
