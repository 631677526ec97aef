"""By what a server knows its clients apart, and what each of them may do."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from edge.errors import RequestError
from edge.server.guard import Guard, Rules
from edge.server.keys import Caller, Key, read_keys
from edge.server.metrics import Metrics

ONE = Key(text="a-key-of-sixteen-or-more")
OTHER = Key(text="another-key-of-somebody", most_answers=3, most_priority="low")


class Seen:
    """The application behind a guard: who was let through."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        self.callers.append(scope["edge.caller"])


async def ask(guard: Guard, key: str) -> None:
    """What a request with this key comes to is not looked at."""

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(_message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "headers": [(b"x-api-key", key.encode())],
        "client": ("192.0.2.7", 4711),
    }
    await guard(scope, receive, send)


@pytest.mark.parametrize(
    ("keys", "shown", "known"),
    [
        ((ONE, OTHER), ONE.text, Caller(name=ONE.client)),
        (
            (ONE, OTHER),
            OTHER.text,
            Caller(name=OTHER.client, most_answers=3, most_priority="low"),
        ),
        ((ONE, OTHER), "a-key-that-nobody-has", None),
        ((), "", Caller(name="192.0.2.7")),
    ],
)
def test_a_client_is_known_by_its_key_or_its_address(
    keys: tuple[Key, ...], shown: str, known: Caller | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = Seen()
    guard = Guard(app, Rules(keys=keys), Metrics(), (), open_paths=())
    with caplog.at_level(logging.INFO, "edge.server.guard"):
        asyncio.run(ask(guard, shown))
    (told,) = caplog.records
    request_id = vars(told)["request"]
    assert request_id in told.getMessage()
    assert not shown or shown not in caplog.text
    for caller in app.callers:
        assert caller.request_id == request_id
        assert known == Caller(
            name=caller.name,
            most_answers=caller.most_answers,
            most_priority=caller.most_priority,
        )
    assert bool(app.callers) == (known is not None)


def test_a_key_stays_the_same_client_wherever_it_stands() -> None:
    assert ONE.client == Key(text=ONE.text, most_answers=1).client != OTHER.client
    assert ONE.text not in ONE.client


def test_a_request_gets_no_more_than_its_key_may_have() -> None:
    assert Caller().priority("high") == "high"
    assert Caller(most_priority="normal").priority("high") == "normal"
    assert Caller(most_priority="normal").priority("low") == "low"


def test_keys_and_their_limits_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(
        f"# of us\n{ONE.text}\n\n  {OTHER.text}  answers=3 priority=low\nlooks=like-a-limit\n"
        "sixteen-or-more-letters shares=us\n"
    )
    shares = Key(text="sixteen-or-more-letters", shares="us")
    assert read_keys(file) == (ONE, OTHER, Key(text="looks=like-a-limit"), shares)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys"),
        ("# nothing else", "has no keys"),
        ("short", "line 1 has a key that can be guessed"),
        (f"{ONE.text}\n{ONE.text} answers=2", "has a key twice"),
        (f"\n{ONE.text} answers=0", "line 2 has a word after its key"),
        (f"{ONE.text} answers=99999999999", "after its key"),
        (f"{ONE.text} priority=urgent", "priority=high|normal|low"),
        (f"{ONE.text} shares=", "shares=WORD"),
        (f"{ONE.text} {OTHER.text}", "further keys go on lines of their own"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(text)
    with pytest.raises(RequestError) as told:
        read_keys(file)
    assert said in str(told.value)
    assert ONE.text not in str(told.value)
    assert OTHER.text not in str(told.value)


@pytest.mark.parametrize(
    ("origin", "told_by_browser", "status"),
    [
        ("https://evil.example", "", 403),
        ("null", "cross-site", 403),
        ("http://localhost:8000", "", 200),
        ("https://mine.example", "same-origin", 200),
        ("", "", 200),
        ("https://Mine.example", "cross-site", 200),
        ("https://mine.example.evil", "cross-site", 403),
    ],
)
def test_a_page_from_elsewhere_uses_no_server_without_keys(
    origin: str, told_by_browser: str, status: int
) -> None:
    """A browser sends a question of plain text unasked, whatever it lets the page read."""
    told: list[int] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    headers = {"host": "localhost:8000", "origin": origin, "sec-fetch-site": told_by_browser}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(name.encode(), each.encode()) for name, each in headers.items() if each],
        "client": ("127.0.0.1", 4711),
    }
    rules = Rules(origins=("https://mine.example",))
    guard = Guard(app, rules, Metrics(), (), open_paths=())
    asyncio.run(guard(scope, receive, send))
    assert told == [status]


def test_browsers_are_told_beforehand_which_pages_may_ask() -> None:
    """Without a key, which they have not yet; other pages are told nothing."""

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError("there is nothing to ask yet")

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    def asked(origin: bytes) -> tuple[int, dict[bytes, bytes]]:
        told: list[Message] = []

        async def send(message: Message) -> None:
            told.append(message)

        scope = {
            "type": "http",
            "method": "OPTIONS",
            "path": "/v1/chat/completions",
            "headers": [
                (b"origin", origin),
                (b"access-control-request-method", b"POST"),
                (b"access-control-request-headers", b"authorization,content-type"),
            ],
            "client": ("192.0.2.7", 4711),
        }
        rules = Rules(keys=(ONE,), origins=("https://mine.example",))
        guard = Guard(app, rules, Metrics(), (), open_paths=())
        asyncio.run(guard(scope, receive, send))
        return told[0]["status"], dict(told[0]["headers"])

    status, headers = asked(b"https://mine.example")
    assert status == 204
    assert headers[b"access-control-allow-origin"] == b"https://mine.example"
    assert headers[b"access-control-allow-headers"] == b"authorization,content-type"
    status, headers = asked(b"https://evil.example")
    assert status == 401
    assert not any(name.startswith(b"access-control") for name in headers)


def test_keys_find_what_they_left_themselves_unless_they_share_it() -> None:
    one, other, another = (Key(text=f"{name:x>16}", shares="us") for name in "abc")
    alone = Key(text=f"{'d':x>16}")
    app = Seen()
    guard = Guard(app, Rules(keys=(one, other, another, alone, ONE)), Metrics(), (), open_paths=())
    for key in (one, other, alone, ONE):
        asyncio.run(ask(guard, key.text))
    salts = [caller.cache_salt for caller in app.callers]
    assert salts[0] == salts[1]
    assert len({*salts, ""}) == 4
    guard.rules = Rules()
    asyncio.run(ask(guard, ""))
    assert app.callers[-1].cache_salt == "", "without keys it is one household"
