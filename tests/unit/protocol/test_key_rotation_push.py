"""Members that were away are told of the cluster's new key, whatever else is announced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from edge.protocol import key_rotation_push
from edge.transport import DiscoveryBus, MemoryDiscovery, PeerRecord
from tests.support.members import Kept
from tests.support.transport_pairs import Silent, echoing, run


@contextlib.asynccontextmanager
async def carried_by(maker: Kept, bus: DiscoveryBus) -> AsyncIterator[asyncio.Event]:
    """Is set when somebody has followed."""
    followed = asyncio.Event()
    discovery = MemoryDiscovery(bus)
    telling = key_rotation_push.KeyRotationPush(maker.credentials(), followed.set)
    running = asyncio.create_task(telling.run(discovery))
    try:
        yield followed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert discovery not in bus.members


@dataclass(frozen=True, slots=True)
class Network:
    """With a device that says nothing, and one that is to be told."""

    silent: Silent
    nothing: str
    """Where the former is."""
    bus: DiscoveryBus
    announcing: MemoryDiscovery
    kitchen: tuple[str, ...]
    """Where the latter is."""


@contextlib.asynccontextmanager
async def network(kitchen: Kept) -> AsyncIterator[Network]:
    silent, bus = Silent(), DiscoveryBus()
    async with (
        silent.listening() as nothing,
        echoing(credentials=kitchen.credentials()) as listener,
        contextlib.aclosing(MemoryDiscovery(bus)) as announcing,
    ):
        yield Network(silent, nothing, bus, announcing, listener.addresses)


def record(id: str, *addresses: str) -> PeerRecord:
    return PeerRecord(id=id, name="", cluster="default", addresses=addresses)


def test_what_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another peer, and another address of the same one."""
    monkeypatch.setattr(key_rotation_push, "ASKED_WITHIN_S", 1e9)
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")

    async def scenario() -> None:
        async with network(kitchen) as there:
            for number in range(5):
                await there.announcing.announce(record(f"of a thief {number}", there.nothing))
            await there.announcing.announce(record("kitchen", there.nothing, *there.kitchen))
            attic.rotate()
            async with carried_by(attic, there.bus) as followed:
                new = attic.membership.cluster_id
                while kitchen.membership.cluster_id != new:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert not followed.is_set()  # all of its addresses get their time
            await there.announcing.aclose()

    run(scenario)


def test_a_flood_of_announcements_delays_it_and_each_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_rotation_push, "MOST_AT_ONCE", 2)
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")

    async def scenario() -> None:
        async with network(kitchen) as there:
            for number in range(4):
                await there.announcing.announce(record(f"of a thief {number}", there.nothing))
            await there.announcing.announce(record("kitchen", *there.kitchen))
            attic.rotate()
            async with carried_by(attic, there.bus) as followed:
                for _ in range(2):
                    called = [await there.silent.calls.get() for _ in range(2)]
                    for _ in range(20):
                        await asyncio.sleep(0)
                    assert there.silent.calls.empty()
                    for writer in called:
                        writer.close()
                await followed.wait()
            await there.announcing.aclose()
        assert kitchen.membership.cluster_id == attic.membership.cluster_id

    run(scenario)
