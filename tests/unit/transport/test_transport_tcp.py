"""Connections over TCP: cancelled sends, garbage, and who owns what."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edge.transport import (
    AddressError,
    Channel,
    ChannelClosedError,
    Frame,
    Link,
    Listener,
    PeerLostError,
    ProtocolError,
    connect,
    connect_link,
    listen,
)
from edge.transport.handshake import MAX_HELLO_BYTES
from edge.transport.listener import _ACCEPT_RETRY_S
from tests.support.passing_time import let_pass
from tests.support.transport_pairs import (
    GREETING,
    channel_pair,
    check_echo,
    echo,
    echoing,
    hang_up,
    refuse_channel,
    refuse_link,
    run,
    stranger,
)


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
            ours = await connect_link(
                listener.addresses[0], credentials=None, hello=hello, link_timeout_s=20
            )
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
            channel = await connect(listener.addresses[0], credentials=None, hello={})
            await channel.send(Frame("fail"))
            with pytest.raises(PeerLostError):
                await channel.receive()
            await channel.aclose()
            link = await connect_link(listener.addresses[0], credentials=None, hello={})
            with pytest.raises(PeerLostError):
                await asyncio.to_thread(link.receive, np.zeros(1))
            link.close()
            await check_echo(listener)

    with caplog.at_level(logging.ERROR, "edge.transport"):
        run(scenario)
    assert [entry.exc_info[0] for entry in caplog.records if entry.exc_info] == [ValueError] * 2


def test_closing_a_listener_ends_what_it_serves() -> None:
    async def scenario() -> None:
        async with echoing() as listener:
            channel = await connect(listener.addresses[0], credentials=None, hello={})
            reader, writer = await stranger(listener)
            await listener.aclose()
            await listener.aclose()
            with pytest.raises(PeerLostError):
                await channel.receive()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            with pytest.raises(AddressError, match="nothing listens there"):
                await connect(listener.addresses[0], credentials=None, hello={})
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
            channel = await connect(listener.addresses[0], credentials=None, hello={})
            await closed.wait()
            await channel.aclose()

    run(scenario)


def test_a_listener_out_of_descriptors_goes_on_when_there_are_some_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[None] = []
    warned: list[None] = []
    accept = Listener._accept

    def counted(listener: Listener, bound: socket.socket) -> None:
        accept(listener, bound)
        tries.append(None)

    async def until_tried(count: int) -> None:
        while len(tries) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def scenario() -> None:
        monkeypatch.setattr("edge.transport.listener._log.warning", lambda *_: warned.append(None))
        monkeypatch.setattr("edge.transport.listener._LOG_EVERY_S", 20.0)
        monkeypatch.setattr(Listener, "_accept", counted)
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
                    for count in range(1, 6):
                        await until_tried(count)
                        assert len(warned) == 1, "once in a while"
                        let_pass(_ACCEPT_RETRY_S)
                    let_pass(20)
                    await until_tried(7)
                    assert len(warned) == 2
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await check_echo(listener)

    run(scenario)


def test_a_hello_too_large_is_refused_on_our_side() -> None:
    async def scenario() -> None:
        hello = {"name": "x" * MAX_HELLO_BYTES}
        with pytest.raises(ProtocolError, match="over the limit"):
            await connect("127.0.0.1:1", credentials=None, hello=hello)
        with pytest.raises(ProtocolError, match="over the limit"):
            await listen(
                "127.0.0.1:0", credentials=None, hello=hello, on_channel=echo, on_link=refuse_link
            )

    run(scenario)
