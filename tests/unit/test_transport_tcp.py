"""Connections over TCP: handshakes, strangers, addresses, and who owns what."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.transport_pairs import channel_pair, refuse_channel, refuse_link
from transport import (
    PROTOCOL_VERSION,
    AddressError,
    Channel,
    ChannelClosedError,
    Frame,
    Link,
    Listener,
    PeerLostError,
    ProtocolError,
    TransportError,
    VersionMismatchError,
    connect,
    connect_link,
    listen,
)
from transport.handshake import MAX_HELLO_BYTES

GREETING = struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION, 1)


async def echo(channel: Channel) -> None:
    with contextlib.suppress(PeerLostError):
        while True:
            await channel.send(await channel.receive())
    await channel.aclose()


@contextlib.asynccontextmanager
async def echoing(**options: Any) -> AsyncIterator[Listener]:
    listener = await listen(
        "127.0.0.1:0",
        **{"hello": {}, "on_channel": echo, "on_link": refuse_link, **options},
    )
    try:
        yield listener
    finally:
        await listener.aclose()


async def check_echo(listener: Listener) -> None:
    channel = await connect(listener.addresses[0], hello={})
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


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(limited())


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00", b"EDGY\x00\x01\x01", GREETING[:-1] + b"\x09"],
)
def test_a_stranger_is_refused_at_once_without_an_answer(garbage: bytes) -> None:
    async def scenario() -> None:
        refused = Refusals()
        async with echoing(on_refused=refused) as listener:
            reader, writer = await stranger(listener)
            writer.write(garbage)
            assert isinstance(await refused.queue.get(), ProtocolError)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            await hang_up(writer)
            await check_echo(listener)

    run(scenario)


@pytest.mark.parametrize(
    "hello",
    [
        struct.pack("!II", MAX_HELLO_BYTES + 1, 0),
        struct.pack("!II", 20, 1),
        struct.pack("!II", 14, 0) + b'{"kind":"hey"}',
        struct.pack("!II", 12, 0) + b"{{{{{{{{{{{{",
    ],
)
def test_a_bad_hello_is_refused(hello: bytes) -> None:
    async def scenario() -> None:
        refused = Refusals()
        async with echoing(on_refused=refused) as listener:
            reader, writer = await stranger(listener)
            writer.write(GREETING + hello)
            assert isinstance(await refused.queue.get(), ProtocolError)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == GREETING
            await hang_up(writer)
            await check_echo(listener)

    run(scenario)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 65535])
def test_another_version_is_told_to_both_sides(version: int) -> None:
    async def scenario() -> None:
        refused = Refusals()
        async with echoing(on_refused=refused) as listener:
            reader, writer = await stranger(listener)
            writer.write(struct.pack("!4sHB", b"EDGE", version, 1))
            error = await refused.queue.get()
            assert isinstance(error, VersionMismatchError)
            assert (error.ours, error.theirs) == (PROTOCOL_VERSION, version)
            assert "update Edge on" in str(error)
            assert await reader.read() == GREETING
            await hang_up(writer)

    run(scenario)


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Something that listens, reads a little, gives a fixed answer and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(GREETING))
        writer.write(answer)
        await hang_up(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request", ProtocolError),
        (struct.pack("!4sHB", b"EDGE", PROTOCOL_VERSION + 1, 1), VersionMismatchError),
        (b"", PeerLostError),
        (GREETING, PeerLostError),
        (GREETING + struct.pack("!II", 1 << 31, 0), ProtocolError),
    ],
)
def test_connecting_to_something_else_says_what_it_is(
    answer: bytes, error: type[TransportError]
) -> None:
    async def scenario() -> None:
        async with answering(answer) as address:
            for dial in (connect, connect_link):
                with pytest.raises(error, match=r"127\.0\.0\.1") as caught:
                    await dial(address, hello={})
                assert type(caught.value) is error

    run(scenario)


def test_connecting_to_something_silent_ends() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(PeerLostError, match=r"silent for 0\.05 s"):
                await connect(address, hello={}, timeout_s=0.05)

    run(scenario)


def test_a_slow_handshake_ends_and_disturbs_nobody() -> None:
    async def scenario() -> None:
        refused = Refusals()
        async with echoing(on_refused=refused, handshake_timeout_s=0.2) as listener:
            reader, writer = await stranger(listener)
            writer.write(GREETING[:3])
            await check_echo(listener)
            assert isinstance(await refused.queue.get(), PeerLostError)
            assert await reader.read() == b""
            await hang_up(writer)

    run(scenario)


def test_the_oldest_of_too_many_unfinished_handshakes_is_dropped() -> None:
    async def scenario() -> None:
        async with echoing(max_unfinished_handshakes=3) as listener:
            strangers = [await stranger(listener) for _ in range(3)]
            await check_echo(listener)
            assert await strangers[0][0].read() == b""
            for _, writer in strangers[1:]:
                writer.write(GREETING)
            for reader, _ in strangers[1:]:
                assert await reader.readexactly(len(GREETING)) == GREETING
            for _, writer in strangers:
                await hang_up(writer)

    run(scenario)


def test_a_cancelled_send_closes_the_channel_rather_than_corrupt_it() -> None:
    async def scenario() -> None:
        async with channel_pair("tcp") as (alice, bob):
            sending = asyncio.create_task(alice.send(Frame("large", {}, bytes(32 << 20))))
            await asyncio.wait({sending}, timeout=0.05)
            queued = asyncio.create_task(alice.send(Frame("next")))
            await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            with pytest.raises(ChannelClosedError):
                await queued
            with pytest.raises(ChannelClosedError):
                await alice.receive()
            with pytest.raises(PeerLostError):
                await bob.receive()

    run(scenario)


def test_a_send_cancelled_before_its_first_byte_leaves_the_channel_as_it_was() -> None:
    async def scenario() -> None:
        async with channel_pair("tcp") as (alice, bob):
            large = asyncio.create_task(alice.send(Frame("large", {}, bytes(32 << 20))))
            await asyncio.wait({large}, timeout=0.05)
            queued = asyncio.create_task(alice.send(Frame("never")))
            await asyncio.sleep(0)
            queued.cancel()
            await asyncio.wait({queued})
            sending = asyncio.create_task(alice.send(Frame("after")))
            assert (await bob.receive()).kind == "large"
            assert (await bob.receive()).kind == "after"
            await asyncio.gather(large, sending)

    run(scenario)


def test_garbage_on_an_open_channel_is_an_error_that_lasts() -> None:
    async def scenario() -> None:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        async with echoing(on_channel=accepted.put) as listener:
            reader, writer = await stranger(listener)
            hello = b'{"kind":"hello","header":{"name":"odd\\u001b[31m"}}'
            writer.write(GREETING + struct.pack("!II", len(hello), 0) + hello)
            channel = await accepted.get()
            assert channel.peer.startswith("odd[31m (127.0.0.1:")
            writer.write(b"\xff" * 100)
            for call in (channel.receive, channel.receive, lambda: channel.send(Frame("k"))):
                with pytest.raises(ProtocolError, match="over the limit"):
                    await call()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            await hang_up(writer)

    run(scenario)


def test_a_link_is_handed_over_with_its_hello_and_works_at_once() -> None:
    async def scenario() -> None:
        accepted: asyncio.Queue[tuple[Link, Mapping[str, Any]]] = asyncio.Queue()

        async def on_link(link: Link, hello: Mapping[str, Any]) -> None:
            await accepted.put((link, hello))

        async with echoing(on_channel=refuse_channel, on_link=on_link) as listener:
            hello = {"name": "rank 1", "rank": 1}
            ours = await connect_link(listener.addresses[0], hello=hello, link_timeout_s=20)
            # Sent before the other side has a link: not a byte of it may be lost on the way.
            array = np.arange(2048, dtype=np.float32)
            ours.send(array)
            theirs, seen = await accepted.get()
            assert dict(seen) == hello
            assert "rank 1" in theirs.peer
            assert ours.peer == listener.addresses[0]
            into = np.empty_like(array)
            await asyncio.to_thread(theirs.receive, into)
            assert (into == array).all()
        # The handler has returned and the listener is closed: the link lives on.
        theirs.send(array)
        ours.receive(into)
        ours.close()
        theirs.close()

    run(scenario)


def test_a_handler_that_fails_closes_only_its_own_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(channel: Channel) -> None:
        frame = await channel.receive()
        if frame.kind == "fail":
            raise ValueError("on purpose")
        await channel.send(frame)
        await echo(channel)

    async def fail_link(link: Link, hello: Mapping[str, Any]) -> None:
        raise ValueError("on purpose")

    async def scenario() -> None:
        async with echoing(on_channel=fail, on_link=fail_link) as listener:
            channel = await connect(listener.addresses[0], hello={})
            await channel.send(Frame("fail"))
            with pytest.raises(PeerLostError):
                await channel.receive()
            await channel.aclose()
            link = await connect_link(listener.addresses[0], hello={})
            with pytest.raises(PeerLostError):
                await asyncio.to_thread(link.receive, np.zeros(1))
            link.close()
            await check_echo(listener)

    with caplog.at_level(logging.ERROR, "transport"):
        run(scenario)
    assert [entry.exc_info[0] for entry in caplog.records if entry.exc_info] == [ValueError] * 2


def test_closing_a_listener_ends_what_it_serves() -> None:
    async def scenario() -> None:
        async with echoing() as listener:
            channel = await connect(listener.addresses[0], hello={})
            reader, writer = await stranger(listener)
            await listener.aclose()
            await listener.aclose()
            with pytest.raises(PeerLostError):
                await channel.receive()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            with pytest.raises(AddressError, match="nothing listens there"):
                await connect(listener.addresses[0], hello={})
            await hang_up(writer)
            await channel.aclose()

    run(scenario)


def test_a_handler_may_close_its_listener() -> None:
    async def scenario() -> None:
        listeners: list[Listener] = []
        closed = asyncio.Event()

        async def close(channel: Channel) -> None:
            await listeners[0].aclose()
            await channel.aclose()
            closed.set()

        async with echoing(on_channel=close) as listener:
            listeners.append(listener)
            channel = await connect(listener.addresses[0], hello={})
            await closed.wait()
            await channel.aclose()

    run(scenario)


def test_a_listener_out_of_descriptors_goes_on_when_there_are_some_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        warned = asyncio.Event()
        monkeypatch.setattr("transport.listener._log.warning", lambda *_: warned.set())
        async with echoing() as listener:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with socket.socket() as client:
                client.setblocking(False)
                spare = os.dup(0)
                os.close(spare)
                resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
                try:
                    await asyncio.get_running_loop().sock_connect(
                        client, ("127.0.0.1", listener.port)
                    )
                    await warned.wait()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await check_echo(listener)

    run(scenario)


def test_a_hello_too_large_is_refused_on_our_side() -> None:
    async def scenario() -> None:
        hello = {"name": "x" * MAX_HELLO_BYTES}
        with pytest.raises(ProtocolError, match="over the limit"):
            await connect("127.0.0.1:1", hello=hello)
        with pytest.raises(ProtocolError, match="over the limit"):
            await listen("127.0.0.1:0", hello=hello, on_channel=echo, on_link=refuse_link)

    run(scenario)
