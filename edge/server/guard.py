"""ASGI middleware that checks keys, hosts, origins and sizes before a request is read.

Any page can make a browser on this machine send requests to this server (DNS rebinding). So on a
loopback address the server answers only to names of this machine. Other origins than those in the
rules cannot read replies, and cannot send requests where no key is needed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.server.keys import Caller, Key, find_key
from edge.server.metrics import Metrics
from edge.server.refusals import Dialect, Refusal

_log = logging.getLogger(__name__)

MOST_BODY_BYTES = 32 << 20
"""Several photos in base64."""

_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a server requires of its clients."""

    keys: tuple[Key, ...] = ()
    """API keys; a request needs one of them. Empty: no key is needed."""
    hosts: tuple[str, ...] = ()
    """Host names that are accepted in addition to numeric addresses; empty: any."""
    origins: tuple[str, ...] = ()
    """Other origins whose pages may use the server."""
    most_body_bytes: int = MOST_BODY_BYTES
    most_body_s: float = 120.0
    """Seconds for a request's body, after its head. 32 MiB in this time are 2.2 Mbit/s."""


def dialect_of(scope: Scope) -> Dialect:
    """The dialect of error bodies for a request."""
    path = scope["path"]
    if path.startswith("/v1/messages") or (
        path.startswith("/v1/models") and says_anthropic(scope["headers"])
    ):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def says_anthropic(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request has the header that clients of Anthropic's API always send."""
    return any(name == b"anthropic-version" for name, _value in headers)


class Guard:
    """The middleware. It gives each request an id, for the reply and the log, and a caller: the
    owner of its key, or its address."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Rules,
        metrics: Metrics,
        paths: Sequence[str],
        *,
        open_paths: Sequence[str],
    ) -> None:
        """paths: those that metrics name. open_paths: public paths that need no key."""
        self._app = app
        self._open_paths = frozenset(open_paths)
        self.rules = rules
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        request_id = f"req_{uuid.uuid4().hex}"
        scope["request_id"] = request_id
        headers = dict(scope["headers"])
        status, has_begun = 500, False
        allowed = self._allowed(headers)

        async def sending(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                named = [b"x-request-id"]
                if dialect_of(scope) == "anthropic":
                    named.append(b"request-id")
                ids = [(name, request_id.encode()) for name in named]
                message["headers"] = [*message["headers"], *ids, *allowed]
            await send(message)

        try:
            if allowed and scope["method"] == "OPTIONS":
                await _allow_beforehand(headers, sending)
                return
            scope["edge.caller"] = replace(self._check(scope, headers), request_id=request_id)
            await self._app(scope, self._bounded(receive), sending)
        except Refusal as refusal:
            await refuse(refusal, dialect_of(scope), sending)
        except asyncio.CancelledError:  # the server shuts down, after its grace period
            if has_begun:
                raise
            ending = Refusal(503, "the server shut down before this was done; ask again")
            await refuse(ending, dialect_of(scope), sending)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            _log.info(
                "%s %s %s %d %.0f ms",
                request_id, scope["method"], path, status, 1e3 * (time.perf_counter() - began_s),
                extra={"request": request_id},
            )  # fmt: skip

    def _allowed(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """CORS headers, with which the browser lets a page of an allowed origin read the reply."""
        origin = headers.get(b"origin", b"")
        if origin.decode("latin-1").lower() not in self.rules.origins:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """The caller: the owner of the key, or an address if no keys are set. Raises Refusal."""
        rules, path = self.rules, scope["path"]
        caller = Caller(name=str((scope.get("client") or ("",))[0]))
        if rules.hosts and not _is_known_host(headers.get(b"host", b""), rules.hosts):
            raise Refusal(
                403, "this server is not known by that name; ask it by its address, or localhost"
            )
        is_allowed = bool(self._allowed(headers))
        if not rules.keys and not is_allowed and _is_of_another_origin(headers):
            raise Refusal(
                403,
                "pages of other origins may not use this server; its owner can allow one with "
                "--cors-origin",
            )
        if rules.keys and path not in self._open_paths:
            key = find_key(rules.keys, _shown_key(headers))
            if key is None:
                raise Refusal(
                    401,
                    "an API key is needed, as Authorization: Bearer KEY or x-api-key: KEY",
                    code="invalid_api_key",
                )
            caller = Caller(
                name=key.client,
                most_answers=key.most_answers,
                most_priority=key.most_priority,
                cache_salt=key.cache_salt,
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > rules.most_body_bytes:
            raise self._too_long()
        return caller

    def _bounded(self, receive: Receive) -> Receive:
        """Limit the bytes and the time of a body, also where its header names another length."""
        taken = 0
        is_whole = False
        rules, deadline_s = self.rules, asyncio.get_running_loop().time() + self.rules.most_body_s

        async def bounded() -> Message:
            nonlocal taken, is_whole
            if is_whole:  # the app now waits for the client to disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise Refusal(
                    408,
                    f"the body did not come within {rules.most_body_s:g} s; send it at once",
                    closes=True,
                ) from None
            taken += len(message.get("body", b""))
            if taken > rules.most_body_bytes:
                raise self._too_long()
            is_whole = not message.get("more_body", False)
            return message

        return bounded

    def _too_long(self) -> Refusal:
        return Refusal(413, f"a body has at most {self.rules.most_body_bytes:,} bytes here")


async def refuse(refusal: Refusal, dialect: Dialect, send: Send) -> None:
    """Answer with a refusal. Nothing must have been sent before."""
    body = json.dumps(refusal.body(dialect)).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.lower(): value for name, value in refusal.headers.items()},
    }
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": refusal.status,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def _allow_beforehand(headers: dict[bytes, bytes], send: Send) -> None:
    """Answer a CORS preflight, which a browser sends without a key before the page's request."""
    allowed = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


def _shown_key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return key.strip()[:_KEY_BYTES]


def _is_of_another_origin(headers: dict[bytes, bytes]) -> bool:
    """Whether a page of another origin asks. Behind a proxy only sec-fetch-site says so."""
    origin = headers.get(b"origin")
    if origin is None or headers.get(b"sec-fetch-site") == b"same-origin":
        return False
    return origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()


def _is_known_host(host: bytes, known: Sequence[str]) -> bool:
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name in known:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
