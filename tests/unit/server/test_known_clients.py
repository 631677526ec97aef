"""By what a server knows its clients apart."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from edge.server.guard import Guard, Rules
from edge.server.metrics import Metrics

KEYS = ("a-key-of-sixteen-or-more", "another-key-of-somebody")


@pytest.mark.parametrize(
    ("keys", "shown", "client"),
    [
        (KEYS, KEYS[0], "key 0"),
        (KEYS, KEYS[1], "key 1"),
        (KEYS, "a-key-that-nobody-has", None),
        ((), "", "192.0.2.7"),
    ],
)
def test_a_client_is_known_by_its_key_or_its_address(
    keys: tuple[str, ...], shown: str, client: str | None
) -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["edge.client"])

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(_message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "headers": [(b"x-api-key", shown.encode())],
        "client": ("192.0.2.7", 4711),
    }
    asyncio.run(Guard(app, Rules(keys=keys), Metrics(), (), open_paths=())(scope, receive, send))
    assert seen == ([] if client is None else [client])
