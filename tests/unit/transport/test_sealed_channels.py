"""What somebody between the two ends of a sealed channel can do: nothing but end it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from edge.transport import ChannelClosedError, Frame, PeerLostError, ProtocolError, TcpChannel
from edge.transport.async_socket import AsyncSocket
from edge.transport.frame import encode
from edge.transport.records import SECRET_BYTES, TAG_BYTES, RecordSecrets
from edge.transport.sealed_socket import CHANNEL_RECORD_BYTES, SMALL_BYTES, SealedSocket
from tests.support.transport_pairs import channel_pair, flipped, socket_pair

SIZE_BYTES = 8
FRAME = Frame("prompt", {"text": "the secret of the attic " * 4}, b"payload " * 20)
ON_THE_WIRE = SIZE_BYTES + sum(len(each) for each in encode(FRAME)) + TAG_BYTES
LARGE = Frame("weights", {}, random.Random(1).randbytes(3 * CHANNEL_RECORD_BYTES))


@asynccontextmanager
async def between() -> AsyncIterator[tuple[TcpChannel, TcpChannel, socket.socket, socket.socket]]:
    """Alice's and Bob's ends, and the sockets of who sits between, hers first."""
    secrets = os.urandom(2 * SECRET_BYTES), b"transcript"
    ends, ways = [], []
    for name, listens in (("bob", False), ("alice", True)):
        own, to_own = socket_pair()
        to_own.setblocking(False)
        keys = RecordSecrets.derived(*secrets, listens=listens)
        ends.append(TcpChannel(SealedSocket(AsyncSocket(own, name), keys), {}))
        ways.append(to_own)
    try:
        yield ends[0], ends[1], ways[0], ways[1]
    finally:
        for end in ends:
            await end.aclose()
        for way in ways:
            way.close()


async def taken(way: socket.socket, nbytes: int) -> bytes:
    content = b""
    while len(content) < nbytes:
        content += await asyncio.get_running_loop().sock_recv(way, nbytes - len(content))
    return content


async def put(way: socket.socket, content: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(way, content)


def run(scenario: Callable[[], object]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()  # type: ignore[misc]

    asyncio.run(limited())


def test_what_passes_is_what_was_sent_and_shows_nothing() -> None:
    async def scenario() -> None:
        async with between() as (alice, bob, hers, his):
            seen: set[bytes] = set()
            for _ in range(3):
                await alice.send(FRAME)
                record = await taken(hers, ON_THE_WIRE)
                assert b"attic" not in record
                assert b"payload" not in record
                seen.add(record[SIZE_BYTES:])
                await put(his, record)
                assert await bob.receive() == FRAME
            assert len(seen) == 3

    run(scenario)


def test_a_large_frame_comes_in_any_pieces() -> None:
    """Also one byte at a time, and where a receive is given up in the middle."""

    async def scenario() -> None:
        async with between() as (alice, bob, hers, his):
            sending = asyncio.create_task(alice.send(LARGE))
            head = len(encode(LARGE)[0]) + SIZE_BYTES + TAG_BYTES
            record = await taken(hers, head)
            for place in range(len(record)):
                receiving = asyncio.create_task(bob.receive())
                await put(his, record[place : place + 1])
                await asyncio.sleep(0)
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
            receiving = asyncio.create_task(bob.receive())
            chance = random.Random(2)
            left = 3 * (SIZE_BYTES + CHANNEL_RECORD_BYTES + TAG_BYTES)
            while left:
                part = await taken(hers, min(left, chance.choice((1, 7, 5000, 700_000))))
                left -= len(part)
                await put(his, part)
            assert await receiving == LARGE
            await sending

    run(scenario)


@pytest.mark.parametrize(
    "change",
    [
        flipped(SIZE_BYTES - 1),
        flipped(SIZE_BYTES),
        flipped(ON_THE_WIRE - 1),
        lambda first, second: second,  # reordered, or the first one lost
        lambda first, second: (1 << 40).to_bytes(SIZE_BYTES) + first[SIZE_BYTES:],
        lambda first, second: bytes(SIZE_BYTES) + first[SIZE_BYTES:],
    ],
    ids=["size", "content", "tag", "another", "a huge size", "no size"],
)
def test_a_changed_record_ends_the_channel(change: Callable[[bytes, bytes], bytes]) -> None:
    async def scenario() -> None:
        async with between() as (alice, bob, hers, his):
            await alice.send(FRAME)
            await alice.send(Frame(FRAME.kind, FRAME.header, bytes(len(FRAME.payload))))
            first, second = await taken(hers, ON_THE_WIRE), await taken(hers, ON_THE_WIRE)
            await put(his, change(first, second) + second)
            for _ in range(2):
                with pytest.raises(ProtocolError, match="not sealed for this channel"):
                    await bob.receive()

    run(scenario)


def test_records_repeated_sent_back_or_of_another_channel_end_it() -> None:
    async def scenario() -> None:
        async with between() as (alice, bob, hers, his), between() as (_, other, _, to_other):
            await alice.send(FRAME)
            record = await taken(hers, ON_THE_WIRE)
            await put(his, record + record)
            await put(hers, record)
            await put(to_other, record)
            assert await bob.receive() == FRAME
            for end in (bob, alice, other):
                with pytest.raises(ProtocolError, match="not sealed for this channel"):
                    await end.receive()

    run(scenario)


@pytest.mark.parametrize("length", [0, 1, SIZE_BYTES, ON_THE_WIRE - 1])
def test_a_record_cut_short_is_a_lost_peer(length: int) -> None:
    async def scenario() -> None:
        async with between() as (alice, bob, hers, his):
            await alice.send(FRAME)
            await put(his, (await taken(hers, ON_THE_WIRE))[:length])
            his.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerLostError):
                await bob.receive()

    run(scenario)


def test_a_send_that_is_given_up_closes_the_channel() -> None:
    """No number of a record is used twice."""

    async def scenario() -> None:
        async with between() as (alice, _bob, _hers, _his):
            sending = asyncio.create_task(alice.send(Frame("k", {}, bytes(32 << 20))))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            with pytest.raises(ChannelClosedError):
                await alice.send(FRAME)

    run(scenario)


def test_a_record_that_nobody_waits_for_is_refused_before_memory_is_set_aside() -> None:
    """Half a MiB for each of many connections is more than a daemon keeps for all."""

    async def scenario() -> None:
        async with between() as (_alice, bob, _hers, his):
            receiving = asyncio.create_task(bob.receive())
            await asyncio.sleep(0)
            tracemalloc.start()
            try:
                await put(his, struct.pack("!Q", CHANNEL_RECORD_BYTES))
                with pytest.raises(ProtocolError, match="was not sealed for this channel"):
                    await receiving
                assert tracemalloc.get_traced_memory()[1] < SMALL_BYTES
            finally:
                tracemalloc.stop()

    run(scenario)


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1, CHANNEL_RECORD_BYTES + 1])
def test_a_channel_that_waits_holds_no_record(size: int) -> None:
    async def scenario() -> None:
        async with channel_pair("sealed") as (ours, theirs):
            await ours.send(Frame("k"))
            await theirs.receive()
            tracemalloc.start()
            try:
                sending = asyncio.create_task(ours.send(Frame("k", {"text": "x" * size})))
                assert len((await theirs.receive()).header["text"]) == size
                await sending
                sending = asyncio.create_task(ours.send(Frame("k", {}, bytes(size))))
                assert len((await theirs.receive()).payload) == size
                await sending
                del sending
                assert tracemalloc.get_traced_memory()[0] < SMALL_BYTES
            finally:
                tracemalloc.stop()

    run(scenario)
