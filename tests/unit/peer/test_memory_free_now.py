"""A peer without a given budget looks at what other programs leave, at each plan and load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edge.errors import CapacityError
from edge.host import free_memory
from edge.memory import baseline
from edge.memory.ledger import Use
from edge.peer.resources import PeerResources
from edge.peer.rest import DeviceUse, why_rest
from edge.peer.settings import PeerSettings

MIB, GIB = 1 << 20, 1 << 30


class Machine:
    """Made-up figures of a machine: what is free, and what this process has taken of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int) -> None:
        self.others_bytes = self.own_bytes = 0
        self.total_bytes = free_bytes

        def available() -> SimpleNamespace:
            left = self.total_bytes - self.others_bytes - self.own_bytes
            return SimpleNamespace(available=max(0, left), total=16 * GIB)

        monkeypatch.setattr(psutil, "virtual_memory", available)
        monkeypatch.setattr(free_memory, "tightest_group", lambda: None)
        monkeypatch.setattr(free_memory, "memory_left_bytes", lambda: None)
        monkeypatch.setattr(
            baseline,
            "process_memory",
            lambda: {"anonymous_bytes": self.own_bytes, "resident_bytes": 0},
        )


def with_peer(
    folder: Path,
    then: Callable[[PeerResources], Awaitable[None]],
    *,
    memory_bytes: int | None = None,
    spare_bytes: int | None = None,
) -> None:
    async def main() -> None:
        resources = PeerResources(
            PeerSettings(
                name="p",
                listen="127.0.0.1:0",
                threads=1,
                announce=False,
                backend="null",
                cache_root=folder,
                cache_limit_bytes=MIB,
                memory_bytes=memory_bytes,
                spare_memory_bytes=spare_bytes,
            ),
            None,
        )
        await resources.open()
        await then(resources)
        await resources.aclose()

    asyncio.run(main())


def test_what_others_have_taken_is_neither_told_nor_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, free_bytes=5 * GIB)

    async def then(peer: PeerResources) -> None:
        promised = peer.describe()
        room_bytes = 4 * GIB - promised.floor_bytes
        assert (promised.free_bytes, promised.free_now_bytes) == (room_bytes, room_bytes)
        machine.others_bytes = 3 * GIB
        told = peer.describe()
        assert told.free_now_bytes == 2 * GIB - 768 * MIB - told.floor_bytes
        assert told.device().memory_bytes == told.free_now_bytes
        assert told.free_bytes == room_bytes
        assert (told.memory_bytes, told.identity) == (promised.memory_bytes, promised.identity)
        with pytest.raises(CapacityError, match="free on this machine now") as caught:
            await peer.reserve("load", Use(weight_bytes=2 * GIB))
        assert "end other programs" in (caught.value.remedy or "")
        assert not peer.ledger.uses
        await peer.reserve("load", Use(weight_bytes=told.free_now_bytes))
        peer.release("load")
        machine.others_bytes = 0
        assert peer.describe().free_now_bytes == room_bytes
        await peer.reserve("load", Use(weight_bytes=room_bytes))

    with_peer(tmp_path, then)


def test_what_it_holds_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is allocated yet, it is entered: another load must not take it."""
    machine = Machine(monkeypatch, free_bytes=5 * GIB)

    async def then(peer: PeerResources) -> None:
        await peer.reserve("first", Use(weight_bytes=2 * GIB))
        assert peer.describe().free_now_bytes == 2 * GIB - peer.ledger.baseline.total
        machine.own_bytes = 2 * GIB
        assert peer.describe().free_now_bytes == 2 * GIB - peer.ledger.baseline.total
        machine.others_bytes = 3 * GIB
        assert peer.describe().free_now_bytes == 0
        assert peer.ledger.uses["first"].total == 2 * GIB
        with pytest.raises(CapacityError):
            await peer.reserve("second", Use(weight_bytes=MIB))

    with_peer(tmp_path, then)


def test_memory_that_changes_a_little_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, free_bytes=5 * GIB)

    async def then(peer: PeerResources) -> None:
        promised = peer.describe()
        machine.others_bytes = 200 * MIB
        assert peer.describe().free_now_bytes == promised.free_bytes
        machine.others_bytes = 500 * MIB
        assert peer.describe().free_now_bytes < promised.free_bytes
        await peer.reserve("planned before", Use(weight_bytes=promised.free_bytes))

    with_peer(tmp_path, then)


@pytest.mark.parametrize("is_started_with", [True, False])
def test_a_given_budget_is_a_promise(
    is_started_with: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, free_bytes=5 * GIB)

    async def then(peer: PeerResources) -> None:
        if not is_started_with:
            assert peer.describe().memory_pool
            await peer.promise(3 * GIB)
        machine.others_bytes = 5 * GIB
        told = peer.describe()
        assert (told.free_now_bytes, told.memory_pool) == (3 * GIB - told.floor_bytes, None)
        await peer.reserve("load", Use(weight_bytes=told.free_bytes))

    with_peer(tmp_path, then, memory_bytes=3 * GIB if is_started_with else None)


def test_its_own_models_leave_the_spare_memory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would load a model, rest because of it, and lend again, in turns."""
    machine = Machine(monkeypatch, free_bytes=8 * GIB)

    async def then(peer: PeerResources) -> None:
        told = peer.describe()
        assert told.free_now_bytes == told.free_bytes == 5 * GIB - told.floor_bytes
        await peer.reserve("load", Use(weight_bytes=told.free_bytes))
        machine.own_bytes = peer.ledger.budget_bytes
        free_bytes = psutil.virtual_memory().available
        use = DeviceUse(on_battery=False, unused_s=None, free_bytes=free_bytes)
        assert why_rest(peer.settings, use, rests=False) is None

    with_peer(tmp_path, then, spare_bytes=2 * GIB)
