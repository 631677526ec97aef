"""Who was away while a device was expelled asks before it lets that in; and what it then hears goes
on to the others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from edge.membership.membership import Change, Membership, credentials
from edge.peer.expulsion_sync import (
    AGAIN_AFTER_S,
    AGAIN_AT_FIRST_S,
    FIRST_LOOK_S,
    SUSPENDED_S,
    ExpulsionSync,
)
from edge.protocol.announced_peers import ANNOUNCED
from edge.protocol.expulsion import LOOK_EVERY_S
from edge.system.since_boot import since_boot_s
from edge.transport import Credentials, DiscoveryBus, Member, MemoryDiscovery, PeerRecord
from tests.support.passing_time import let_pass
from tests.support.transport_pairs import Refusals, echoing, run


class Device:
    """A membership that is kept in memory."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @property
    def id(self) -> str:
        return self.membership.identity.id

    @property
    def member(self) -> Member:
        return Member(id=self.id, name="n", roles=self.membership.roles, edition=0)

    @property
    def expelled(self) -> frozenset[str]:
        return self.membership.expelled.ids

    def change(self, change: Change) -> None:
        self.membership = change(self.membership)

    def credentials(self) -> Credentials:
        return credentials(lambda: self.membership, self.change)


def devices() -> tuple[Device, Device, Device, Device]:
    """The first made the cluster."""
    first = Membership.founded("attic")
    assert first.authority is not None
    others = [
        replace(Membership.enrolled(first.authority, first.tag_key, name), authority=None)
        for name in ("kitchen", "cellar", "phone")
    ]
    attic, kitchen, cellar, phone = (Device(each) for each in (first, *others))
    return attic, kitchen, cellar, phone


@contextlib.asynccontextmanager
async def asking(
    device: Device, bus: DiscoveryBus, clock: Callable[[], float] = since_boot_s
) -> AsyncIterator[ExpulsionSync]:
    discovery = MemoryDiscovery(bus, cluster="c")
    news = ExpulsionSync(device.credentials(), discovery, {}, clock=clock)
    running = asyncio.create_task(news.run())
    try:
        yield news
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await discovery.aclose()


@contextlib.asynccontextmanager
async def announced(device: Device, bus: DiscoveryBus) -> AsyncIterator[Refusals]:
    """What it refuses."""
    discovery, refused = MemoryDiscovery(bus, cluster="c"), Refusals()
    hello = {ANNOUNCED: [device.id]}
    async with echoing(
        hello=hello, credentials=device.credentials(), on_refused=refused
    ) as listener:
        record = PeerRecord(id=device.id, name="", cluster="c", addresses=listener.addresses)
        await discovery.announce(record)
        yield refused
        await discovery.aclose()


async def until_knows(device: Device, expelled: Device) -> None:
    while expelled.id not in device.expelled:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_who_was_away_asks_before_it_lets_in_whom_others_may_have_expelled() -> None:
    async def scenario() -> None:
        attic, kitchen, cellar, phone = devices()
        attic.change(lambda newest: newest.expelling(cellar.id))
        bus = DiscoveryBus()
        async with asking(kitchen, bus) as news:
            letting = [asyncio.create_task(news.lets_in(d.member)) for d in (cellar, phone)]
            for sure in (attic, kitchen):
                assert await news.lets_in(sure.member)
            async with announced(attic, bus):
                await until_knows(kitchen, cellar)
                assert not any(each.done() for each in letting)
                let_pass(FIRST_LOOK_S)
                assert await asyncio.gather(*letting) == [False, True]

    run(scenario)


def test_who_was_suspended_asks_everybody_again_before_it_lets_anybody_in() -> None:
    async def scenario() -> None:
        attic, kitchen, cellar, phone = devices()
        bus, clock_s = DiscoveryBus(), 0.0
        async with (
            asking(kitchen, bus, lambda: clock_s) as news,
            announced(attic, bus),
        ):
            while all(other.told is None for other in news._others.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            let_pass(FIRST_LOOK_S)
            assert await news.lets_in(cellar.member)
            clock_s += LOOK_EVERY_S + SUSPENDED_S  # late, as on a busy machine: no suspension
            assert await asyncio.wait_for(news.lets_in(cellar.member), 1)
            attic.change(lambda newest: newest.expelling(cellar.id))
            clock_s += LOOK_EVERY_S + SUSPENDED_S + 0.1
            # Before any tick of its own.
            letting = [asyncio.create_task(news.lets_in(d.member)) for d in (cellar, phone)]
            assert await news.lets_in(attic.member)
            await until_knows(kitchen, cellar)
            assert not any(each.done() for each in letting)
            let_pass(FIRST_LOOK_S)
            assert await asyncio.gather(*letting) == [False, True]

    run(scenario)


def test_who_was_suspended_while_it_looked_looks_for_the_whole_time_again() -> None:
    async def scenario() -> None:
        _, kitchen, cellar, _ = devices()
        clock_s = 0.0
        async with asking(kitchen, DiscoveryBus(), lambda: clock_s) as news:
            letting = asyncio.create_task(news.lets_in(cellar.member))
            await asyncio.sleep(0)
            clock_s += 100
            let_pass(FIRST_LOOK_S)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not letting.done()
            let_pass(FIRST_LOOK_S)
            assert await letting

    run(scenario)


def test_where_nobody_is_the_others_are_let_in_after_the_same_time() -> None:
    async def scenario() -> None:
        _, kitchen, cellar, _ = devices()
        async with asking(kitchen, DiscoveryBus()) as news:
            letting = asyncio.create_task(news.lets_in(cellar.member))
            await asyncio.sleep(0)
            let_pass(FIRST_LOOK_S)
            assert await letting

    run(scenario)


def test_who_announces_what_does_not_answer_holds_up_nobody() -> None:
    async def scenario() -> None:
        attic, kitchen, cellar, _ = devices()
        attic.change(lambda newest: newest.expelling(cellar.id))
        bus = DiscoveryBus()
        mallory = MemoryDiscovery(bus, cluster="c")
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            port = silent.getsockname()[1]
            for number in range(40):
                await mallory.announce(
                    PeerRecord(
                        id=f"m{number}", name="", cluster="c", addresses=(f"127.0.0.1:{port}",)
                    )
                )
            async with asking(kitchen, bus), announced(attic, bus):
                await until_knows(kitchen, cellar)
        await mallory.aclose()

    run(scenario)


def test_all_addresses_of_an_announcement_are_dialled_whatever_the_others_answer() -> None:
    """Else a stranger who announces its own behind another one learns by it what that one is."""

    async def scenario() -> None:
        attic, kitchen, cellar, _ = devices()
        attic.change(lambda newest: newest.expelling(cellar.id))
        bus = DiscoveryBus()
        dialled = [asyncio.Event(), asyncio.Event()]

        def dialling(event: asyncio.Event) -> Callable[[object, asyncio.StreamWriter], None]:
            def dial(_: object, writer: asyncio.StreamWriter) -> None:
                event.set()
                writers.append(writer)

            return dial

        writers: list[asyncio.StreamWriter] = []
        discovery = MemoryDiscovery(bus, cluster="c")
        async with contextlib.AsyncExitStack() as stack:
            addresses = []
            for event in dialled:
                server = await asyncio.start_server(dialling(event), "127.0.0.1", 0)
                await stack.enter_async_context(server)
                addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            listener = await stack.enter_async_context(echoing(credentials=attic.credentials()))
            addresses.insert(1, listener.addresses[0])
            await discovery.announce(
                PeerRecord(id=attic.id, name="", cluster="c", addresses=tuple(addresses))
            )
            async with asking(kitchen, bus):
                await asyncio.gather(*(event.wait() for event in dialled))
                await until_knows(kitchen, cellar)
            for writer in writers:
                writer.close()
            await discovery.aclose()

    run(scenario)


def test_another_members_answer_at_an_announced_address_is_not_the_announced_ones() -> None:
    """Of two devices with a bridge of one address, each may answer itself there."""

    async def scenario() -> None:
        attic, kitchen, cellar, _ = devices()
        bus = DiscoveryBus()
        discovery = MemoryDiscovery(bus, cluster="c")
        async with (
            echoing(credentials=kitchen.credentials(), hello={ANNOUNCED: ["k"]}) as listener,
            asking(attic, bus) as news,
        ):
            for id in ("k", "c"):
                record = PeerRecord(id=id, name="", cluster="c", addresses=listener.addresses)
                await discovery.announce(record)
            attic.change(lambda newest: newest.expelling(cellar.id))
            others = news._others
            while len(others) < 2 or not all(o.due_s or o.told for o in others.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert news._others["k"].told is not None
            assert news._others["c"].told is None
        await discovery.aclose()

    run(scenario)


def test_what_another_process_of_the_device_does_is_told_also_to_who_could_not_be_reached() -> None:
    async def scenario() -> None:
        attic, kitchen, cellar, phone = devices()
        bus = DiscoveryBus()
        async with asking(attic, bus) as news, announced(kitchen, bus) as refused:
            attic.change(lambda newest: newest.expelling(cellar.id))
            let_pass(LOOK_EVERY_S)
            await until_knows(kitchen, cellar)
            known = kitchen.membership
            kitchen.membership = Membership.founded("elsewhere")  # it refuses all for a while
            attic.change(lambda newest: newest.expelling(phone.id))
            let_pass(LOOK_EVERY_S)
            await refused.queue.get()
            while news._under_way:  # noqa: ASYNC110
                await asyncio.sleep(0)
            kitchen.membership = known
            let_pass(AGAIN_AT_FIRST_S)
            async with asyncio.timeout(AGAIN_AFTER_S / 2):
                await until_knows(kitchen, phone)

    asyncio.run(scenario())


def test_what_is_heard_is_told_to_the_others() -> None:
    async def scenario() -> None:
        attic, kitchen, cellar, phone = devices()
        attic.change(lambda newest: newest.expelling(cellar.id))
        bus = DiscoveryBus()
        async with asking(kitchen, bus), announced(phone, bus), announced(attic, bus):
            await until_knows(phone, cellar)

    run(scenario)
