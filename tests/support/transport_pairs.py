"""Both ends of every kind of channel, link and group; a listener that echoes, and strangers."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from edge.membership.membership import Membership, credentials
from edge.transport import (
    PROTOCOL_VERSION,
    Channel,
    Collective,
    Credentials,
    Frame,
    Link,
    Listener,
    MemoryChannel,
    MemoryLink,
    PeerLostError,
    SoloCollective,
    TcpLink,
    TransportError,
    WireRule,
    connect,
    listen,
    open_mesh,
)
from edge.transport.records import PLAIN, SECRET_BYTES, Records, RecordSecrets, SealedRecords

CHANNEL_KINDS = ("memory", "tcp", "sealed", "near")
LINK_KINDS = ("memory", "tcp", "sealed", "near")
ANOTHER_HOST = "127.0.0.2"
"""Where who is called from 127.0.0.1 does not know that it is the same one."""

DEVICE_KIND = "gloo"
"""A group that sums tensors from device to device, beside links in memory."""

Result = TypeVar("Result")


async def refuse_channel(channel: Channel) -> None:
    """The handler of a listener that expects no channel."""
    await channel.aclose()
    raise AssertionError(f"unexpected channel from {channel.peer}")


async def refuse_link(link: Link, hello: Mapping[str, Any]) -> None:
    """The handler of a listener that expects no link."""
    link.close()
    raise AssertionError(f"unexpected link from {link.peer}: {dict(hello)}")


@contextlib.asynccontextmanager
async def channel_pair(kind: str) -> AsyncIterator[tuple[Channel, Channel]]:
    """Two ends; the first says ``{"name": "alice"}`` of itself, the second ``{"name": "bob"}``."""
    hello_a, hello_b = {"name": "alice"}, {"name": "bob"}
    if kind == "memory":
        ends = MemoryChannel.pair("alice", "bob", first_hello=hello_a, second_hello=hello_b)
        yield ends
        for end in ends:
            await end.aclose()
        return
    accepted: asyncio.Queue[Channel] = asyncio.Queue()
    ours, theirs = (None, None) if kind == "tcp" else members(2)
    listener = await listen(
        f"{ANOTHER_HOST if kind == 'sealed' else '127.0.0.1'}:0",
        hello=hello_b,
        credentials=theirs,
        on_channel=accepted.put,
        on_link=refuse_link,
    )
    alice = await connect(listener.addresses[0], hello=hello_a, credentials=ours)
    bob = await accepted.get()
    try:
        yield alice, bob
    finally:
        await alice.aclose()
        await bob.aclose()
        await listener.aclose()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    return first, second


def link_ends(
    kind: str, first: str = "first", second: str = "second", *, timeout_s: float = 30.0
) -> tuple[Link, Link]:
    """Two ends whose ``peer`` is ``second`` and ``first``; the caller closes them."""
    if kind == "memory":
        return MemoryLink.pair(first, second, timeout_s=timeout_s)
    one, other = socket.socketpair() if kind == "near" else socket_pair()
    records: tuple[Records, Records] = (PLAIN, PLAIN)
    if kind == "sealed":
        records = sealed_pair()
    return (
        TcpLink(one, second, timeout_s, records[0]),
        TcpLink(other, first, timeout_s, records[1]),
    )


def sealed_pair(records_per_key: int = 3) -> tuple[Records, Records]:
    """Both ends of a link with keys of its own, which soon wear out."""
    secrets = os.urandom(2 * SECRET_BYTES), b"transcript"
    one, other = (
        SealedRecords(RecordSecrets.derived(*secrets, listens=listens), records_per_key)
        for listens in (False, True)
    )
    return one, other


def members(count: int) -> list[Credentials]:
    """Devices of one cluster."""
    first = Membership.founded("first")
    assert first.authority is not None
    others = [
        Membership.enrolled(first.authority, first.tag_key, f"device {index}")
        for index in range(1, count)
    ]
    return [credentials(partial(_itself, each)) for each in (first, *others)]


def _itself(membership: Membership) -> Membership:
    return membership


@contextlib.contextmanager
def link_pair(kind: str, *, timeout_s: float = 30.0) -> Iterator[tuple[Link, Link]]:
    """Two ends, closed at the end."""
    ends = link_ends(kind, timeout_s=timeout_s)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@contextlib.contextmanager
def group(
    kind: str,
    size: int,
    *,
    timeout_s: float = 30.0,
    wrap: Callable[[int, int, Link], Link] = lambda rank, other, link: link,
    rule: WireRule = WireRule(),  # noqa: B008  it is frozen
) -> Iterator[list[Collective]]:
    """One collective per rank; ``wrap`` may put a faulty link around any of the links."""
    members: list[Collective]
    if size == 1:
        members = [SoloCollective()]
    else:
        links: list[dict[int, Link]] = [{} for _ in range(size)]
        for low in range(size):
            for high in range(low + 1, size):
                ends = "memory" if kind == DEVICE_KIND else kind
                first, second = link_ends(ends, timeout_s=timeout_s)
                links[low][high] = wrap(low, high, first)
                links[high][low] = wrap(high, low, second)
        members = [open_mesh(rank, links[rank], rule) for rank in range(size)]
    if kind == DEVICE_KIND:
        from tests.support.device_groups import NumpyFace, joined

        members = [NumpyFace(member) for member in on_every_rank(members, joined)]
    try:
        yield members
    finally:
        for member in members:
            member.close()


def in_threads(calls: list[Callable[[], Result]]) -> list[Result | Exception]:
    """Run all calls at once, each in its thread; what each returned or raised, in order."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_every_rank(members: list[Collective], call: Callable[[Collective], Result]) -> list[Result]:
    """Run ``call`` on all ranks at once; the results by rank, or the first error."""
    results = []
    for result in in_threads([partial(call, member) for member in members]):
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def leave_in_the_middle(members: list[Collective], count: int) -> list[str]:
    """What each rank says of sums of so many numbers; the last one leaves after two of them."""

    def run(member: Collective) -> str:
        array = np.ones(count, np.float32)
        for turn in range(4):
            if member.rank == len(members) - 1 and turn == 2:
                member.close()
                return "left"
            try:
                member.all_reduce(array)
            except PeerLostError:
                member.close()  # As its owner does, so that the others need not wait for it.
                return f"lost at {turn}"
        return "done"

    return on_every_rank(members, run)


GREETING = struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 1)
SECURED_GREETING = GREETING[:-1] + b"\x11"


async def echo(channel: Channel) -> None:
    with contextlib.suppress(PeerLostError):
        while True:
            await channel.send(await channel.receive())
    await channel.aclose()


@contextlib.asynccontextmanager
async def echoing(address: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[Listener]:
    listener = await listen(
        address,
        **{"hello": {}, "credentials": None, "on_channel": echo, "on_link": refuse_link, **options},
    )
    try:
        yield listener
    finally:
        await listener.aclose()


async def check_echo(listener: Listener, credentials: Credentials | None = None) -> None:
    channel = await connect(listener.addresses[0], credentials=credentials, hello={})
    await channel.send(Frame("ping"))
    assert (await channel.receive()).kind == "ping"
    await channel.aclose()


async def stranger(listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", listener.port)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Refusals:
    """What a listener refused, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[TransportError] = asyncio.Queue()

    def __call__(self, address: str, error: TransportError) -> None:
        assert address.startswith("127.0.0.1:")
        self.queue.put_nowait(error)


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


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(limited())


def flipped(offset: int) -> Callable[[bytes, bytes], bytes]:
    """Of two messages the first one, with the lowest bit of a byte flipped."""

    def change(first: bytes, _second: bytes) -> bytes:
        return first[:offset] + bytes([first[offset] ^ 1]) + first[offset + 1 :]

    return change
