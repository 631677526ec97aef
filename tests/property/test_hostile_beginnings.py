"""What comes before a device is known, changed in its bytes: announcements, the first bytes of a
connection on their way, and the messages of pairing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import RequestError
from edge.membership.identity import Identity
from edge.membership.membership import Membership, credentials
from edge.membership.pairing import Invitation, Other, WrongCodeError, join, new_code
from edge.transport import (
    Channel,
    Credentials,
    Frame,
    MemoryChannel,
    PeerRecord,
    TransportError,
    connect,
)
from edge.transport.discovery.zeroconf_record import record_of, services_of
from edge.transport.testing import Fault, FaultyChannel
from tests.support.members import Kept
from tests.support.mutated_frames import mutated_bytes, mutated_frame
from tests.support.transport_pairs import check_echo, echoing, run

T = TypeVar("T")

CLUSTER, KEY = "home", bytes(range(32))
RECORD = PeerRecord(
    id="0" * 32,
    name="attic",
    cluster=CLUSTER,
    addresses=("10.1.2.3:4321", "[fd00::1]:4321"),
    properties={"memory": "24 GB"},
)
SERVICES = {key: services_of(RECORD, (), key)[0] for key in (KEY, None)}
CONNECTIONS, PAIRINGS = 150, 24
HANDSHAKE_S = 1.0
"""Where a size was changed, both sides wait for the other."""


@settings(max_examples=300)
@given(seed=st.integers(0, 2**64), key=st.sampled_from([KEY, None]))
def test_a_changed_announcement_is_nobodys_or_leads_nowhere_else(
    seed: int, key: bytes | None
) -> None:
    """With a key it is nobody's, or says the same. Without one, where anybody may announce
    anything, it is refused or has texts that can be shown and addresses that can be dialled."""
    chance = random.Random(seed)
    service = SERVICES[key]
    assert record_of(service.name, service.properties, CLUSTER, key) == RECORD
    entries, name = dict(service.properties), service.name
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.choice([*entries, None])
        if place is None:
            name = mutated_bytes(name.encode(), chance).decode(errors="replace")
        elif chance.randrange(4):
            entries[place] = mutated_bytes(entries[place] or b"", chance)
        else:
            entries[mutated_bytes(place, chance)] = entries.pop(place)
    found = record_of(name, entries, CLUSTER, key)
    if key is not None:
        assert found in (None, RECORD)
    elif found is not None:
        assert (found.id + found.name).isprintable()
        for address in found.addresses:
            assert not address.startswith(("0.0.0.0:", "[::]:"))
            assert not address.endswith(":0")


class OnTheWay:
    """Stands between two members, and changes a bit of one piece of what passes, or cuts it off."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self.pieces = 0
        self.changed_at: int | None = None
        self.chance = random.Random()
        self.was_changed = False

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pieces, self.was_changed = 0, False
        onward = await asyncio.open_connection(self._host, int(self._port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, onward[1]))
                group.create_task(self._pass(onward[0], writer))
        finally:
            for each in (writer, onward[1]):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                if self.pieces == self.changed_at:
                    self.was_changed = True
                    at = self.chance.randrange(len(piece))
                    if self.chance.randrange(4) == 0:
                        writer.write(piece[:at])
                        break
                    bit = 1 << self.chance.randrange(8)
                    piece = piece[:at] + bytes([piece[at] ^ bit]) + piece[at + 1 :]
                self.pieces += 1
                writer.write(piece)
        writer.close()


@contextlib.asynccontextmanager
async def on_the_way(address: str) -> AsyncIterator[tuple[OnTheWay, str]]:
    between = OnTheWay(address)
    server = await asyncio.start_server(between.meet, "127.0.0.1", 0)
    async with server:
        yield between, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def asked(address: str, shown: Credentials) -> str:
    """What is answered to a member, which says one word and hears it again."""
    channel = await connect(address, credentials=shown, hello={})
    try:
        await channel.send(Frame("ping"))
        return (await channel.receive()).kind
    finally:
        await channel.aclose()


async def answer_once(channel: Channel) -> None:
    with contextlib.suppress(TransportError):
        await channel.send(await channel.receive())
    await channel.aclose()


def test_a_connection_that_is_changed_on_its_way_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever piece of the handshake it is, of whichever side; and members are served on."""
    first = Membership.founded("first")
    assert first.authority is not None
    second = Membership.enrolled(first.authority, first.tag_key, "second")
    shown = credentials(lambda: second)

    async def scenario() -> None:
        async with (
            echoing(
                credentials=credentials(lambda: first),
                on_channel=answer_once,
                handshake_timeout_s=HANDSHAKE_S,
            ) as listener,
            on_the_way(listener.addresses[0]) as (between, address),
        ):
            assert await asked(address, shown) == "ping"
            pieces = between.pieces
            assert pieces > 6
            for seed in range(CONNECTIONS):
                between.changed_at, between.chance = seed % pieces, random.Random(seed)
                with contextlib.suppress(TransportError):
                    assert await asked(address, shown) == "ping"
                    assert not between.was_changed, seed
            await check_echo(listener, shown)

    run(scenario)
    assert not [each for each in caplog.records if each.exc_info]


class ChangedChannel(FaultyChannel):
    """Changes one of the messages that are sent on it."""

    def __init__(self, inner: Channel, at: int, chance: random.Random) -> None:
        super().__init__(inner, Fault.LOSE, after_calls=1000)
        self._at, self._chance = at, chance
        self.is_as_it_was = True

    async def send(self, frame: Frame) -> None:
        if self._at == 0:
            changed = mutated_frame(frame, self._chance)
            self.is_as_it_was = (changed.kind, dict(changed.header), bytes(changed.payload)) == (
                frame.kind,
                dict(frame.header),
                bytes(frame.payload),
            )
            frame = changed
        self._at -= 1
        await super().send(frame)


@pytest.mark.parametrize("of_the_inviter", [True, False], ids=["inviter", "joiner"])
def test_a_changed_message_of_pairing_makes_no_member_of_somebody_else(
    of_the_inviter: bool,
) -> None:
    """Either nothing comes of it, or, where what was changed says nothing, what was meant."""
    first = Membership.founded("attic")
    device = Identity.made()
    code = new_code()

    async def scenario() -> None:
        for seed in range(PAIRINGS):
            chance = random.Random(seed)
            pair = MemoryChannel.pair("attic", "kitchen")
            changing = ChangedChannel(pair[0 if of_the_inviter else 1], seed % 2, chance)
            ends: tuple[Channel, Channel]
            ends = (changing, pair[1]) if of_the_inviter else (pair[0], changing)
            inviting = Invitation(code, Kept(first), "attic").take_in(ends[0])
            joining = join(ends[1], code, device, "kitchen")
            seen, got = await asyncio.gather(
                ended(inviting, ends[0]), ended(joining, ends[1]), return_exceptions=True
            )
            for outcome in (seen, got):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, RequestError | TransportError | TimeoutError), seed
            if isinstance(seen, Other):
                assert seen == Other(name="kitchen", id=device.id)
            if not isinstance(got, BaseException):
                assert got[0].cluster_id == first.cluster_id
                assert isinstance(seen, Other)
            if changing.is_as_it_was:
                assert not isinstance(seen, WrongCodeError)

    run(scenario)


async def ended(side: Awaitable[T], end: Channel) -> T:
    try:
        return await side
    finally:
        await end.aclose()
