"""Who may come in, and how much they may say: checked before anything is read for them.

An ASGI layer around the app. A browser on this machine can be made to ask this server by any page
(DNS rebinding): so on a loopback address only names of this machine are answered to. No other
origin is allowed to read anything, nor, where no key is asked for, to ask, but those in the rules.
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

MOST_BODY_BYTES = 8 << 20

_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a server asks of its clients."""

    keys: tuple[Key, ...] = ()
    """One of them must be shown; none: everybody may come."""
    hosts: tuple[str, ...] = ()
    """Names that it is known by, in addition to numeric addresses; empty: any."""
    origins: tuple[str, ...] = ()
    """Origins of pages from elsewhere that may use it."""
    most_body_bytes: int = MOST_BODY_BYTES
    most_body_s: float = 120.0
    """From the end of a request's head to that of its body: 8 MiB come at 0.6 Mbit/s."""


def dialect_of(scope: Scope) -> Dialect:
    """Whose words an error is told in."""
    path = scope["path"]
    if path.startswith("/v1/messages") or (
        path.startswith("/v1/models") and says_anthropic(scope["headers"])
    ):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def says_anthropic(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the header is there that clients of Anthropic's interface send with every request."""
    return any(name == b"anthropic-version" for name, _value in headers)


class Guard:
    """The layer. Every request gets an id, which its answer and the log have, and is known by whose
    key it has, or its address."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Rules,
        metrics: Metrics,
        paths: Sequence[str],
        *,
        open_paths: Sequence[str],
    ) -> None:
        """paths: that metrics name. open_paths: answered without a key, as they tell nothing."""
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
        except asyncio.CancelledError:  # the server ends, and has waited for as long as it does
            if has_begun:
                raise
            ending = Refusal(503, "the server ends, and this was not done by then; ask again")
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
        """What lets the browser of a page from elsewhere show it the answer."""
        origin = headers.get(b"origin", b"")
        if origin.decode("latin-1").lower() not in self.rules.origins:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Who it is: whose key it is, or where there are none an address."""
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
                "a page from elsewhere may not use this server; its owner can let it in by "
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
        """Whatever a body says of its length, no more of it is read, and for no longer."""
        taken = 0
        is_whole = False
        rules, deadline_s = self.rules, asyncio.get_running_loop().time() + self.rules.most_body_s

        async def bounded() -> Message:
            nonlocal taken, is_whole
            if is_whole:  # who asks now, waits for the client to go away
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
    """Answer with it; nothing must have been sent before."""
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
    """A browser asks, without a key, before it sends what a page wants."""
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
    """Whether a page asks that did not come from here. Behind a proxy only the browser knows."""
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
