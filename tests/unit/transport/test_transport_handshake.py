"""The first bytes of a connection: strangers, other versions, slow and silent ones."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from edge.transport import (
    PROTOCOL_VERSION,
    PeerLostError,
    ProtocolError,
    TransportError,
    VersionMismatchError,
    connect,
    connect_link,
)
from edge.transport.handshake import MAX_HELLO_BYTES
from tests.support.passing_time import let_pass
from tests.support.transport_pairs import (
    GREETING,
    Refusals,
    check_echo,
    echoing,
    hang_up,
    run,
    stranger,
)


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
    """Something that listens, reads a little, gives a fixed answer and hangs up: a greeting in the
    role that it was asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readexactly(len(GREETING))
        writer.write(answer.replace(GREETING, asked))
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
                    await dial(address, credentials=None, hello={})
                assert type(caught.value) is error

    run(scenario)


@pytest.mark.parametrize(("says", "why"), [(b"", "Edge's port"), (GREETING[:3], "the MTU")])
def test_connecting_to_something_silent_ends(says: bytes, why: str) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            connecting = asyncio.create_task(
                connect(address, credentials=None, hello={}, timeout_s=40)
            )
            connected, _ = await loop.sock_accept(silent)
            with connected:
                assert await loop.sock_recv(connected, 1)
                await loop.sock_sendall(connected, says)
                for _ in range(20):
                    await asyncio.sleep(0)
                let_pass(40)
                with pytest.raises(PeerLostError, match=f"silent for 40 s .*{why}"):
                    await connecting

    run(scenario)


def test_a_slow_handshake_ends_and_disturbs_nobody() -> None:
    async def scenario() -> None:
        refused = Refusals()
        async with echoing(on_refused=refused, handshake_timeout_s=40) as listener:
            reader, writer = await stranger(listener)
            writer.write(GREETING[:3])
            await check_echo(listener)
            let_pass(40)
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
