"""Who holds a connection and says or reads nothing: real sockets, and a clock that is moved."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from edge.api.async_model import AsyncModel
from edge.server import connections
from edge.server.app import Server
from edge.server.connections import (
    ACCEPT_RETRY_S,
    LOG_EVERY_S,
    MOST_BODY_S,
    MOST_HEAD_S,
    MOST_UNREAD_S,
    WebServer,
    allow_connections,
    most_connections,
    web_config,
)
from edge.server.guard import Rules
from edge.server.model_pool import ModelPool
from tests.support.passing_time import let_pass, somebody_waits_for
from tests.support.processes import PATIENCE_S
from tests.unit.server.test_gone_clients import EndlessPrompt

VERSION = b"GET /api/version HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASKED = json.dumps({"model": "m", "prompt": "x"}).encode()
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(path: str, *, length: int = len(ASKED)) -> bytes:
    """A head; a body follows."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


class Visited:
    """A server in this event loop, and what was connected to it."""

    def __init__(self, url: tuple[str, int], server: Server) -> None:
        self.server = server
        self._url = url
        self._opened: list[asyncio.StreamWriter] = []

    async def connect(self, first: bytes = b"") -> Streams:
        """Once it is known there, and has begun to wait for more."""
        reader, writer = await asyncio.open_connection(*self._url)
        self._opened.append(writer)
        writer.write(first)
        await writer.drain()
        return reader, writer

    async def aclose(self) -> None:
        for writer in self._opened:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def answered(self, status: int) -> float:
        """How many requests ended so."""
        text = self.server._metrics.text().decode()
        counts = [line for line in text.splitlines() if f'status="{status}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in counts if "_total{" in line)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it changes in this loop
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def visited(
    *, most: int = 8, app: ASGIApp | None = None, listens: type[socket.socket] = socket.socket
) -> AsyncIterator[Visited]:
    """With a model that never answers."""
    model = EndlessPrompt()
    server = Server(ModelPool.of(cast(AsyncModel, model), "m"), rules=Rules())
    web = WebServer(web_config(app or server.app, most_connections=most))
    with listens(fileno=socket.create_server(("127.0.0.1", 0)).detach()) as listening:
        running = asyncio.create_task(web.serve(sockets=[listening]))
        found = Visited(listening.getsockname(), server)
        try:
            yield found
        finally:
            await found.aclose()
            web.should_exit = True
            await running


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionResetError:
        return b""


async def reply_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    async with asyncio.timeout(PATIENCE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("first", [b"", b"GET /api/ver", VERSION[:-2]])
def test_a_head_that_does_not_end_is_not_waited_for(first: bytes) -> None:
    async def test() -> None:
        async with visited() as server:
            reader, writer = await server.connect(first)
            await until(lambda: somebody_waits_for(MOST_HEAD_S))
            let_pass(MOST_HEAD_S / 3)
            writer.write(b"x")  # a byte now and then puts nothing off
            await writer.drain()
            let_pass(MOST_HEAD_S)
            assert await rest_of(reader) == b""

    asyncio.run(test())


def test_a_further_request_has_the_same_time() -> None:
    async def test() -> None:
        async with visited() as server:
            reader, writer = await server.connect(VERSION)
            assert (await reply_of(reader))[0] == 200
            writer.write(VERSION[:20])
            await writer.drain()
            await until(lambda: somebody_waits_for(MOST_HEAD_S))
            let_pass(MOST_HEAD_S)
            assert await rest_of(reader) == b""

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_a_body_that_does_not_come_is_refused(path: str) -> None:
    async def test() -> None:
        async with visited() as server:
            reader, _ = await server.connect(post(path) + ASKED[:5])
            await until(lambda: somebody_waits_for(Rules().most_body_s))
            let_pass(Rules().most_body_s)
            status, headers, told = await reply_of(reader)
            assert (status, headers["connection"]) == (408, "close")
            assert "did not come within 120 s" in json.dumps(told)
            if path == "/v1/messages":
                assert told["error"]["type"] == "timeout_error"
            assert await rest_of(reader) == b""

    asyncio.run(test())


def test_a_body_that_nobody_reads_ends_too() -> None:
    async def test() -> None:
        async with visited() as server:
            reader, writer = await server.connect(post("/nothing") + ASKED[:5])
            assert (await reply_of(reader))[0] == 404
            writer.write(ASKED[5:6])  # uvicorn has its own clock, until more comes
            await writer.drain()
            await until(lambda: somebody_waits_for(MOST_BODY_S))
            let_pass(MOST_BODY_S)
            assert await rest_of(reader) == b""

    asyncio.run(test())


def test_an_answer_may_take_as_long_as_it_likes() -> None:
    async def test() -> None:
        async with visited() as server:
            reader, _ = await server.connect(post("/v1/completions") + ASKED)
            await until(lambda: server.server.gate.inside)
            let_pass(10 * MOST_BODY_S)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reader.at_eof()
            assert server.server.gate.inside == 1

    asyncio.run(test())


def test_who_goes_away_in_the_middle_of_a_body_is_no_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with visited() as server:
            _, writer = await server.connect(post("/v1/completions") + ASKED[:5])
            await until(lambda: somebody_waits_for(Rules().most_body_s))
            writer.close()
            await until(lambda: server.answered(499) == 1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())
    assert caplog.text == ""


def test_who_reads_nothing_is_not_waited_for() -> None:
    has_ended = asyncio.Event()

    async def endless(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        has_ended.set()

    async def test() -> None:
        async with visited(app=endless) as server:
            _, writer = await server.connect(VERSION)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: somebody_waits_for(MOST_UNREAD_S))
            let_pass(MOST_UNREAD_S)
            async with asyncio.timeout(PATIENCE_S):
                await has_ended.wait()

    asyncio.run(test())


def test_where_all_connections_are_busy_a_further_one_is_told_so() -> None:
    async def test() -> None:
        async with visited(most=2) as server:
            for _ in range(2):
                await server.connect(post("/v1/completions") + ASKED)
            await until(lambda: server.server.gate.inside == 2)
            for path in ("/v1/messages", "/v1/completions"):
                reader, _ = await server.connect(post(path, length=0))
                status, headers, told = await reply_of(reader)
                assert (status, headers["retry-after"], headers["connection"]) == (
                    503,
                    "2",
                    "close",
                )
                assert "too many connections" in told["error"]["message"]
                assert told.get("type") == ("error" if path == "/v1/messages" else None)
                assert await rest_of(reader) == b""

    asyncio.run(test())


def test_connections_that_wait_make_room_for_others() -> None:
    async def test() -> None:
        async with visited(most=2) as server:
            await server.connect(post("/v1/completions") + ASKED)
            await until(lambda: server.server.gate.inside)
            waiting, _ = await server.connect(VERSION)
            assert (await reply_of(waiting))[0] == 200
            other, _ = await server.connect(VERSION)
            assert (await reply_of(other))[0] == 200
            assert await rest_of(waiting) == b""
            assert server.server.gate.inside == 1

    asyncio.run(test())


def test_there_are_never_more_than_that() -> None:
    async def test() -> None:
        async with visited(most=2) as server:
            for _ in range(2):
                await server.connect(post("/v1/completions") + ASKED)
            await until(lambda: server.server.gate.inside == 2)
            silent = [(await server.connect())[0] for _ in range(20)]
            for reader in silent[:-1]:
                assert await rest_of(reader) == b""
            assert not silent[-1].at_eof()
            assert server.server.gate.inside == 2

    asyncio.run(test())


def test_what_is_no_request_is_refused_in_json() -> None:
    async def test() -> None:
        async with visited() as server:
            for wrong in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x" * 70_000):
                reader, _ = await server.connect(wrong)
                status, headers, told = await reply_of(reader)
                assert (status, headers["connection"]) == (400, "close")
                assert told["error"]["type"] == "invalid_request_error"

    asyncio.run(test())


def test_a_body_that_becomes_nonsense_ends_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def test() -> None:
        async with visited() as server:
            reader, writer = await server.connect(head % b"nothing")
            assert (await reply_of(reader))[0] == 404  # that is all that can be said
            writer.write(b"no length\r\n")
            assert await rest_of(reader) == b""
            reader, writer = await server.connect(head % b"v1/completions")
            await until(lambda: somebody_waits_for(Rules().most_body_s))
            writer.write(b"no length\r\n")
            assert (await reply_of(reader))[0] == 400
            await until(lambda: server.answered(499) == 1)

    with caplog.at_level(logging.ERROR):
        asyncio.run(test())
    assert caplog.text == ""


def test_there_is_room_for_every_answer() -> None:
    assert most_connections(1000) > 1250


def test_without_descriptors_it_tries_again_and_says_so_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            tries.append(1)
            if len(tries) <= 8:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def test() -> None:
        async with visited(listens=Exhausted) as server:
            reader, _ = await server.connect(VERSION)
            for count in range(1, 9):
                await until(lambda count=count: len(tries) == count)  # type: ignore[misc]
                let_pass(LOG_EVERY_S if count == 4 else ACCEPT_RETRY_S)
            assert (await reply_of(reader))[0] == 200

    asyncio.run(test())
    assert len(tries) == 9
    assert len(caplog.records) == 2
    assert "cannot accept connections for a moment: Too many open files" in caplog.text


@pytest.mark.parametrize(("limit", "allowed"), [(256, 128), (1024, 512), (4096, 1506)])
def test_connections_leave_descriptors_for_the_rest(
    limit: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "allow_descriptors", lambda wanted: min(wanted, limit))
    assert allow_connections(most_connections(1000)) == allowed
