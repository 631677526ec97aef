"""Who comes to a device that shows a code, and whom a device with a code finds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from spake2 import SPAKE2_A, SPAKE2_B

from edge import transport
from edge.errors import NetworkError, RequestError
from edge.membership.identity import Identity
from edge.membership.pairing import Other, WrongCodeError, join, meeting_place
from edge.membership.pairing_discovery import find_and_join, invite
from edge.transport import (
    Channel,
    DiscoveryBus,
    Frame,
    Link,
    MemoryDiscovery,
    PeerLostError,
    PeerRecord,
)
from tests.support.members import HeldChannel, Kept
from tests.support.passing_time import let_pass

CODE = "acorn actor album amber angle apron"
WRONG = "acorn actor album amber angle album"
HERE = "127.0.0.1:0"
PATIENCE_S = 40.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def patient() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(patient())


@dataclass
class Inviter:
    address: str
    bus: DiscoveryBus
    outcome: asyncio.Task[Other]
    talks: list[Channel] = field(default_factory=list)

    async def stranger(self, said: Frame | None = None) -> Channel:
        """Somebody who has come, and perhaps said something."""
        channel = await transport.connect(self.address, hello={}, credentials=None)
        self.talks.append(channel)
        if said is not None:
            await channel.send(said)
            assert (await channel.receive()).kind == "pair"
        return channel

    async def joined(self) -> Other:
        """Who has taken in a device with the right words."""
        _, other = await find_and_join(CODE, Identity.made(), "kitchen", address=self.address)
        return other


@contextlib.asynccontextmanager
async def inviting() -> AsyncIterator[Inviter]:
    bus = DiscoveryBus()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    outcome = asyncio.create_task(
        invite(
            CODE,
            Kept.founded("attic"),
            "attic",
            listen=HERE,
            discovery=MemoryDiscovery(bus, cluster=meeting_place(CODE)),
            on_ready=lambda addresses: ready.set_result(addresses[0]),
        )
    )
    inviter = Inviter(await ready, bus, outcome)
    try:
        yield inviter
    finally:
        outcome.cancel()
        await asyncio.gather(outcome, return_exceptions=True)
        for channel in inviter.talks:
            await channel.aclose()


def begun() -> Frame:
    """What anybody can begin with: a point of the curve."""
    return Frame("pair", {}, SPAKE2_A(b"a guess").start())


async def answers(channel: Channel) -> None:
    """Hear them, until the other side hangs up."""
    while True:
        await channel.receive()


async def is_hung_up_on(channel: Channel) -> None:
    with pytest.raises(PeerLostError):
        await channel.receive()


@pytest.mark.parametrize("says", [False, True], ids=["silent", "has said something"])
def test_strangers_do_not_keep_out_whoever_has_the_words(says: bool) -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            for _ in range(15):
                await inviter.stranger(begun() if says else None)
            assert (await inviter.joined()).name == "attic"
            assert (await inviter.outcome).name == "kitchen"

    run(scenario)


def test_of_one_address_four_are_talked_with_the_silent_go_first() -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            talking = await inviter.stranger(begun())
            silent = [await inviter.stranger() for _ in range(3)]
            newest = await inviter.stranger(begun())
            await is_hung_up_on(silent[0])
            for channel in silent[1:]:
                await inviter.stranger(begun())
                await is_hung_up_on(channel)
            await inviter.stranger(begun())
            await is_hung_up_on(talking)
            await newest.send(Frame("join", {}, bytes(64)))
            with pytest.raises(WrongCodeError):
                await inviter.outcome

    run(scenario)


def test_who_says_nothing_is_hung_up_on_soon() -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            silent = await inviter.stranger()
            talking = await inviter.stranger(begun())
            let_pass(3.0)
            await is_hung_up_on(silent)
            await is_hung_up_on(talking)
            assert not inviter.outcome.done()

    run(scenario)


def test_one_wrong_proof_ends_the_code_for_all() -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            waiting = HeldChannel(await inviter.stranger(), "join")
            right = asyncio.create_task(join(waiting, CODE, Identity.made(), "kitchen"))
            await waiting.reached.wait()
            with pytest.raises(NetworkError):
                await find_and_join(WRONG, Identity.made(), "mallory", address=inviter.address)
            waiting.goes_on.set()
            with pytest.raises(WrongCodeError):
                await inviter.outcome
            with pytest.raises(transport.TransportError):
                await right

    run(scenario)


def test_the_others_are_hung_up_on_once_one_is_taken_in() -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            others = [await inviter.stranger(), await inviter.stranger(begun())]
            await inviter.joined()
            assert (await inviter.outcome).name == "kitchen"
            for channel in others:
                await is_hung_up_on(channel)

    run(scenario)


NO_POINT = b"A" + bytes([2]) + bytes(31)


@pytest.mark.parametrize(
    "said",
    [
        [Frame("pair", {}, NO_POINT)],
        [Frame("pair", {}, bytes(65 << 10))],
        [Frame("other")],
        [begun(), Frame("other")],
    ],
    ids=["no point", "large", "another kind", "no proof"],
)
def test_nonsense_is_no_guess(said: list[Frame]) -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            channel = await inviter.stranger()
            for frame in said:
                await channel.send(frame)
            with pytest.raises(transport.TransportError):
                await answers(channel)
            assert (await inviter.joined()).name == "attic"
            assert (await inviter.outcome).name == "kitchen"

    run(scenario)


@pytest.mark.parametrize(
    "announced",
    [
        pytest.param(struct.pack("!II", 15, 64 << 20) + b'{"kind":"pair"}', id="payload"),
        # The rest would take a quarter of a second to read, of 0.9 MB.
        pytest.param(struct.pack("!II", 2 << 10, 0), id="header"),
    ],
)
def test_nothing_is_set_aside_or_read_of_what_a_stranger_announces(
    announced: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge.membership.pairing._WORD_LIMIT_S", 2 * PATIENCE_S)
    monkeypatch.setattr("edge.membership.pairing_discovery._TALK_LIMIT_S", 2 * PATIENCE_S)

    async def scenario() -> None:
        async with inviting() as inviter:
            channel = await inviter.stranger()
            await channel._connection.send_all([announced])  # type: ignore[attr-defined]
            await is_hung_up_on(channel)

    run(scenario)


class Squatter:
    """Announces the place of a code that it does not know; counts who asks it."""

    def __init__(self, bus: DiscoveryBus, *says: Frame) -> None:
        self._discovery = MemoryDiscovery(bus, cluster=meeting_place(CODE))
        self._says = says
        self.times_asked = 0

    async def _on_channel(self, channel: Channel) -> None:
        async with contextlib.aclosing(channel):
            self.times_asked += 1
            for frame in self._says:
                await channel.receive()
                await channel.send(frame)

    async def _on_link(self, link: Link, _hello: object) -> None:
        link.close()

    @contextlib.asynccontextmanager
    async def announced(self, id: str, addresses: int = 1) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._discovery.aclose)
            places: list[str] = []
            for _ in range(addresses):
                listener = await transport.listen(
                    HERE,
                    hello={},
                    credentials=None,
                    on_channel=self._on_channel,
                    on_link=self._on_link,
                )
                stack.push_async_callback(listener.aclose)
                places.extend(listener.addresses)
            place = meeting_place(CODE)
            await self._discovery.announce(
                PeerRecord(id=id, name="", cluster=place, addresses=tuple(places))
            )
            yield


def own_answer() -> Frame:
    return Frame("pair", {}, SPAKE2_B(b"a guess").start())


def found_by(bus: DiscoveryBus) -> MemoryDiscovery:
    return MemoryDiscovery(bus, cluster=meeting_place(CODE))


@pytest.mark.parametrize(
    "says",
    [[], [own_answer()], [own_answer(), Frame("taken in", {}, bytes(64))], [Frame("other")]],
    ids=["silent", "no outcome", "wrong proof", "nonsense"],
)
def test_squatters_do_not_keep_a_device_from_the_right_one(says: list[Frame]) -> None:
    async def scenario() -> None:
        async with inviting() as inviter, contextlib.AsyncExitStack() as stack:
            for number in range(2):
                await stack.enter_async_context(Squatter(inviter.bus, *says).announced(f"{number}"))
            _, other = await find_and_join(
                CODE, Identity.made(), "kitchen", discovery=found_by(inviter.bus)
            )
            assert other.name == "attic"

    run(scenario)


def test_every_address_of_the_right_one_is_tried() -> None:
    async def scenario() -> None:
        async with inviting() as inviter:
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                dead = f"127.0.0.1:{nobody.getsockname()[1]}"
                bus = DiscoveryBus()
                announcing = MemoryDiscovery(bus, cluster=meeting_place(CODE))
                await announcing.announce(
                    PeerRecord(
                        id="attic",
                        name="",
                        cluster=meeting_place(CODE),
                        addresses=(dead, inviter.address),
                    )
                )
                _, other = await find_and_join(
                    CODE, Identity.made(), "kitchen", discovery=found_by(bus)
                )
            assert other.name == "attic"

    run(scenario)


@pytest.mark.parametrize("many", [1, 5])
def test_no_more_than_three_may_guess(many: int) -> None:
    async def scenario() -> None:
        bus = DiscoveryBus()
        squatters = [
            Squatter(bus, own_answer(), Frame("taken in", {}, bytes(64))) for _ in range(many)
        ]
        async with contextlib.AsyncExitStack() as stack:
            for number, squatter in enumerate(squatters):
                await stack.enter_async_context(squatter.announced(str(number)))
            with pytest.raises(NetworkError, match="somebody else may be answering") as raised:
                await find_and_join(CODE, Identity.made(), "kitchen", discovery=found_by(bus))
        assert "--peer" in str(raised.value)
        assert "another network" in str(raised.value)
        assert sum(squatter.times_asked for squatter in squatters) == min(many, 3)
        assert all(squatter.times_asked <= 1 for squatter in squatters)

    run(scenario)


def test_one_with_many_addresses_has_no_more_guesses() -> None:
    async def scenario() -> None:
        bus = DiscoveryBus()
        squatter = Squatter(bus, own_answer(), Frame("taken in", {}, bytes(64)))
        async with squatter.announced("squatter", addresses=5):
            with pytest.raises(NetworkError, match="somebody else may be answering"):
                await find_and_join(CODE, Identity.made(), "kitchen", discovery=found_by(bus))
        assert squatter.times_asked == 3

    run(scenario)


def test_an_address_where_nobody_is() -> None:
    async def scenario() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{nobody.getsockname()[1]}"
            with pytest.raises(NetworkError, match="cannot be reached"):
                await find_and_join(CODE, Identity.made(), "kitchen", address=address)

    run(scenario)


def test_an_answer_that_makes_no_sense_is_told() -> None:
    async def scenario() -> None:
        squatter = Squatter(DiscoveryBus(), Frame("pair", {}, b"B" + NO_POINT[1:]))
        listener = await transport.listen(
            HERE,
            hello={},
            credentials=None,
            on_channel=squatter._on_channel,
            on_link=squatter._on_link,
        )
        with pytest.raises(RequestError, match="does not follow Edge's pairing protocol"):
            await find_and_join(CODE, Identity.made(), "kitchen", address=listener.addresses[0])
        await listener.aclose()

    run(scenario)
