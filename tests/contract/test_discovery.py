"""What every discovery promises, checked on each implementation; zeroconf over loopback."""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from edge.transport import (
    ChannelClosedError,
    Discovery,
    DiscoveryBus,
    MemoryDiscovery,
    PeerEvent,
    PeerFound,
    PeerGone,
    PeerRecord,
    ZeroconfDiscovery,
)

pytestmark = pytest.mark.parametrize("kind", ["memory", "zeroconf"])

Make = Callable[..., Discovery]


def record(cluster: str, peer: str = "one", **changes: object) -> PeerRecord:
    fields: dict[str, object] = {
        "id": f"{peer}-of-{cluster}",
        "name": f"Zoë's {peer}",
        "cluster": cluster,
        "addresses": ("127.0.0.1:4321",),
        "properties": {"memory": "24 GB", "p.odd": ""},
    }
    return PeerRecord(**{**fields, **changes})  # type: ignore[arg-type]


def check(kind: str, scenario: Callable[[Make, str], Awaitable[None]]) -> None:
    """Run ``scenario`` in a cluster of its own: other programs use this network too."""
    threads = set(threading.enumerate())

    async def run() -> None:
        bus, made = DiscoveryBus(), []
        own_cluster = f"test-{uuid.uuid4().hex}"

        def make(cluster: str = own_cluster) -> Discovery:
            made.append(
                MemoryDiscovery(bus, cluster=cluster)
                if kind == "memory"
                else ZeroconfDiscovery(cluster=cluster, interfaces=["127.0.0.1"])
            )
            return made[-1]

        try:
            async with asyncio.timeout(60):
                await scenario(make, own_cluster)
        finally:
            for discovery in made:
                await discovery.aclose()

    asyncio.run(run())
    assert set(threading.enumerate()) == threads


@contextlib.asynccontextmanager
async def watching(discovery: Discovery) -> AsyncIterator[Callable[[], Awaitable[PeerEvent]]]:
    """Gives a function that waits for the next event."""
    events = discovery.watch()
    yield lambda: anext(events)
    await events.aclose()  # type: ignore[attr-defined]


def test_a_peer_is_found_and_gone(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here, there = make(), make()
        async with watching(here) as event:
            first = asyncio.ensure_future(event())
            await there.announce(record(cluster))
            assert await first == PeerFound(record(cluster))
            await there.aclose()
            await there.aclose()
            assert await event() == PeerGone(record(cluster).id)

    check(kind, scenario)


def test_a_peer_that_leaves_at_once_is_not_told_of_again(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here, there, next_one = make(), make(), make()
        async with watching(here) as event:
            await there.announce(record(cluster))
            assert await event() == PeerFound(record(cluster))
            await there.aclose()
            assert await event() == PeerGone(record(cluster).id)
            await next_one.announce(record(cluster, "next"))
            assert await event() == PeerFound(record(cluster, "next"))

    check(kind, scenario)


def test_a_late_watch_sees_who_is_there_and_not_itself(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here, there = make(), make()
        await asyncio.gather(
            here.announce(record(cluster, "here")), there.announce(record(cluster, "there"))
        )
        async with watching(here) as event, watching(here) as other_event:
            assert await event() == PeerFound(record(cluster, "there"))
            assert await other_event() == PeerFound(record(cluster, "there"))
            await there.announce(record(cluster, "third"))
            assert await event() == PeerFound(record(cluster, "third"))

    check(kind, scenario)


def test_a_record_announced_again_replaces_the_earlier_one(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here, there = make(), make()
        async with watching(here) as event:
            await there.announce(record(cluster))
            assert await event() == PeerFound(record(cluster))
            changed = record(cluster, properties={"memory": "8 GB"})
            await there.announce(changed)
            assert await event() == PeerFound(changed)
            await there.aclose()
            assert await event() == PeerGone(changed.id)

    check(kind, scenario)


def test_a_peer_announced_twice_is_one_peer_with_all_its_addresses(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here, there, elsewhere = make(), make(), make()
        async with watching(here) as event:
            await there.announce(record(cluster))
            assert await event() == PeerFound(record(cluster))
            await elsewhere.announce(record(cluster, addresses=("127.0.0.1:55",)))
            merged = record(cluster, addresses=("127.0.0.1:4321", "127.0.0.1:55"))
            found = await event()  # in the order of the sources, which have random names
            assert isinstance(found, PeerFound)
            assert sorted(found.record.addresses) == list(merged.addresses)
            assert replace(found.record, addresses=merged.addresses) == merged
            await there.aclose()
            assert await event() == PeerFound(record(cluster, addresses=("127.0.0.1:55",)))
            await elsewhere.aclose()
            assert await event() == PeerGone(merged.id)

    check(kind, scenario)


def test_other_clusters_are_not_seen(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here, stranger, there = make(), make("another"), make()
        async with watching(here) as event:
            await stranger.announce(record("another"))
            await there.announce(record(cluster))
            assert await event() == PeerFound(record(cluster))
        with pytest.raises(ValueError, match="cluster 'another'"):
            await here.announce(record("another"))

    check(kind, scenario)


def test_closing_ends_watches_and_refuses_announcements(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        here = make()
        async with watching(here) as event:
            waiting = asyncio.ensure_future(event())
            await asyncio.sleep(0)
            await here.aclose()
            with pytest.raises(StopAsyncIteration):
                await waiting
        assert [event async for event in here.watch()] == []
        with pytest.raises(ChannelClosedError):
            await here.announce(record(cluster))

    check(kind, scenario)


def test_it_says_what_it_tries(kind: str) -> None:
    async def scenario(make: Make, cluster: str) -> None:
        assert f"cluster '{cluster}'" in make().describe()

    check(kind, scenario)
