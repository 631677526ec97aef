"""Members that were away are told of the cluster's new key, whatever else is announced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from edge.protocol import carrying
from edge.transport import DiscoveryBus, MemoryDiscovery, PeerRecord
from tests.support.devices import Kept
from tests.support.transport_listeners import echoing, run


class Silent:
    """Takes connections, and says nothing."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._called, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            while not self.calls.empty():
                self.calls.get_nowait().close()

    def _called(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls.put_nowait(writer)


@contextlib.asynccontextmanager
async def carried_by(maker: Kept, bus: DiscoveryBus) -> AsyncIterator[asyncio.Event]:
    """Is set when somebody has followed."""
    followed = asyncio.Event()
    discovery = MemoryDiscovery(bus)
    telling = carrying.Carrying(maker.credentials(), followed.set)
    running = asyncio.create_task(telling.run(discovery))
    try:
        yield followed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert discovery not in bus.members


def record(id: str, *addresses: str) -> PeerRecord:
    return PeerRecord(id=id, name="", cluster="default", addresses=addresses)


def test_what_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another peer, and another address of the same one."""
    monkeypatch.setattr(carrying, "ASKED_WITHIN_S", 1e9)
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")

    async def scenario() -> None:
        silent, bus = Silent(), DiscoveryBus()
        async with (
            silent.listening() as nothing,
            echoing(credentials=kitchen.credentials()) as listener,
            contextlib.aclosing(MemoryDiscovery(bus)) as announcing,
        ):
            for number in range(5):
                await announcing.announce(record(f"of a thief {number}", nothing))
            await announcing.announce(record("kitchen", nothing, *listener.addresses))
            attic.rotate()
            async with carried_by(attic, bus) as followed:
                new = attic.membership.cluster_id
                while kitchen.membership.cluster_id != new:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert not followed.is_set()  # all of its addresses get their time
            await announcing.aclose()

    run(scenario)


def test_a_flood_of_announcements_delays_it_and_each_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrying, "MOST_AT_ONCE", 2)
    attic = Kept.founded()
    kitchen = attic.taking_in("kitchen")

    async def scenario() -> None:
        silent, bus = Silent(), DiscoveryBus()
        async with (
            silent.listening() as nothing,
            echoing(credentials=kitchen.credentials()) as listener,
            contextlib.aclosing(MemoryDiscovery(bus)) as announcing,
        ):
            for number in range(4):
                await announcing.announce(record(f"of a thief {number}", nothing))
            await announcing.announce(record("kitchen", *listener.addresses))
            attic.rotate()
            async with carried_by(attic, bus) as followed:
                for _ in range(2):
                    called = [await silent.calls.get() for _ in range(2)]
                    for _ in range(20):
                        await asyncio.sleep(0)
                    assert silent.calls.empty()
                    for writer in called:
                        writer.close()
                await followed.wait()
            await announcing.aclose()
        assert kitchen.membership.cluster_id == attic.membership.cluster_id

    run(scenario)
