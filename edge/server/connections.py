"""Connections to a server: how many there are, and how long each may keep it waiting.

uvicorn alone waits for ever for a request that does not come, or comes byte by byte, and for a
client that reads nothing. API keys do not help, because the request was not read yet.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from edge.server.guard import dialect_of, refuse
from edge.server.refusals import Refusal
from edge.system.descriptors import WANTED_DESCRIPTORS, allow_descriptors

MOST_HEAD_S = 20.0
"""Seconds until the end of a request's head, from the connection's begin or the first byte of a
further request."""
MOST_BODY_S = 150.0
"""Seconds for a body that no handler reads. `Guard` refuses a slow one that is read sooner
(`Rules.most_body_s`)."""
MOST_UNREAD_S = 120.0
"""Seconds for which a client may read nothing while data is ready for it."""
MOST_IDLE_S = 30.0
"""Seconds between two requests of a connection."""

_FURTHER = 256
"""Connections beyond one for each answer."""
_OTHER_DESCRIPTORS = 512
"""Descriptors for peers and files."""
_MOST_HEAD_BYTES = 64 << 10

ACCEPT_RETRY_S = 0.2
LOG_EVERY_S = 60.0
"""Between two lines about connections that cannot be accepted."""
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger(__name__)


def most_connections(most_answers: int) -> int:
    """Most connections of a server: one for each answer, and some for refused clients and pages."""
    return most_answers + most_answers // 4 + _FURTHER


def allow_connections(wanted: int) -> int:
    """Raise this process's limit of descriptors for `wanted` connections. Returns how many of them
    it leaves room for."""
    limit = allow_descriptors(max(WANTED_DESCRIPTORS, wanted + _OTHER_DESCRIPTORS))
    allowed = limit - min(_OTHER_DESCRIPTORS, limit // 2)
    if allowed < wanted:
        _log.warning(
            "%d connections at once instead of %d, by the limit of %d descriptors (ulimit -Hn)",
            allowed,
            wanted,
            limit,
        )
    return min(wanted, allowed)


def web_config(app: ASGIApp, *, most_connections: int) -> uvicorn.Config:
    """uvicorn's settings with the limits above. A connection too many closes the one that has been
    idle for longest; if all are busy, the new one gets a refusal."""

    class Limited(_Connection):
        most = most_connections

    return uvicorn.Config(
        app,
        http=Limited,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=round(MOST_IDLE_S),
        h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
    )


class WebServer(uvicorn.Server):
    """uvicorn's own, on sockets that listen, which accepts one connection at a time.

    asyncio accepts as many as wait before it looks at any of them. Once no descriptor is left, it
    logs a traceback for each of the tries that it had planned, and plans as many again.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listening: dict[socket.socket, asyncio.TimerHandle | None] = {}
        """With when to go on, where no descriptor was left."""
        self._opening: set[asyncio.Task[Any]] = set()
        self._logs_from_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for each in sockets or []:
            each.setblocking(False)
            self._listen(each)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each, retry in self._listening.items():
            asyncio.get_running_loop().remove_reader(each)
            if retry is not None:
                retry.cancel()
        self._listening.clear()
        await super().shutdown(sockets)

    def _listen(self, listening: socket.socket) -> None:
        self._listening[listening] = None
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connected, _ = listening.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:  # the connection stays in the queue
                if loop.time() >= self._logs_from_s:
                    self._logs_from_s = loop.time() + LOG_EVERY_S
                    _log.warning("cannot accept connections for a moment: %s", error.strerror)
                loop.remove_reader(listening)
                self._listening[listening] = loop.call_later(
                    ACCEPT_RETRY_S, self._listen, listening
                )
            return
        opening = loop.create_task(self._open(connected))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connected: socket.socket) -> None:
        opened: Any = self.config.http_protocol_class  # its type is less than what is used of it
        protocol = partial(
            opened,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connected)
        except OSError:  # it was reset before it could be read
            connected.close()


class _Connection(H11Protocol):
    """uvicorn's connection with time limits."""

    most: int

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        """The state of the request for which the deadline was set: its head or its body."""
        self._unread: asyncio.TimerHandle | None = None
        self._waits_since_s = self.loop.time()

    @property
    def is_waiting(self) -> bool:
        """No request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._has_made_room():
            self.app = _too_many
        self._watch()

    def _has_made_room(self) -> bool:
        waiting = [
            each
            for each in self.connections
            if isinstance(each, _Connection) and each is not self and each.is_waiting
        ]
        if not waiting:
            return False
        min(waiting, key=lambda each: each._waits_since_s).transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """Set a new deadline if the request has moved from head to body or back."""
        awaited = self.conn.their_state
        if awaited is self._awaited:
            return
        self._stop_watching()
        self._awaited = awaited
        limits_s = {h11.IDLE: MOST_HEAD_S, h11.SEND_BODY: MOST_BODY_S}
        if (limit_s := limits_s.get(awaited)) is not None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(limit_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        self._waits_since_s = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(MOST_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_awaiting_reader()

    def _stop_awaiting_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_awaiting_reader()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer in JSON, as all other errors; only close the connection if an answer has begun."""
        body = json.dumps(Refusal(400, msg).body("openai")).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        try:
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:
            self.transport.abort()
        else:
            self.transport.close()


async def _too_many(scope: Scope, _receive: Receive, send: Send) -> None:
    refusal = Refusal(
        503, "too many connections are open, and all are busy; try again soon", closes=True
    )
    await refuse(refusal, dialect_of(scope), send)
