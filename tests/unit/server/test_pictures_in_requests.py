"""Images in requests of every dialect stand in the prompt, and their tiles go with it."""

import asyncio
import base64
import contextlib
import ipaddress
import json
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.api.async_model import AsyncModel
from edge.api.chat_prompts import read_pictures
from edge.api.loaded_model import LoadedModel
from edge.errors import RequestError
from edge.models.pictures import is_row
from edge.pictures.messages import NOT_SEEN
from edge.pictures.reader import PictureReader
from edge.server import pictures
from edge.server.history import turns
from edge.server.pictures import fetch_picture, is_public
from edge.text import Tokenizer
from edge.weights.picture_files import picture_files
from tests.support.scripted_models import ScriptedModel, Visit, word
from tests.support.small_pictures import FAMILIES, noise, png

FILE = png(noise(64, 64))
BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class SeeingModel(ScriptedModel):
    """A scripted model with a real tokenizer, which reads pictures."""

    can_chat = reads_pictures = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        family = FAMILIES["qwen3_vl"]
        tokenizer = Tokenizer.open(family.write(folder, "qwen3_vl"))
        self.reader = PictureReader(picture_files(folder), family.tower, tokenizer)
        self.tokenizer: Any = tokenizer
        self.tiles: list[Any] = []
        held = SimpleNamespace(name="m", picture_reader=self.reader)
        self.read_pictures: Any = partial(read_pictures, cast(LoadedModel, held))

    def stream(self, prompt: Any, *given: object, tiles: Any = (), **further: Any) -> Any:
        self.tiles.append(tiles)
        return super().stream(prompt, *given, **further)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[SeeingModel]:
    found = SeeingModel(tmp_path)
    yield found
    found.reader.close()
    found.tokenizer.close()


def asked(model: ScriptedModel, path: str, body: Any, **server: Any) -> tuple[int | None, Any]:
    """The status and the JSON of the reply."""

    async def main() -> tuple[int | None, Any]:
        model.says.put_nowait(word("A dog.", ends=True))
        visit = Visit(model, path, body, **server)
        await visit.running
        return visit.status, json.loads(visit.text)

    return asyncio.run(main())


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 9}


TEXT = {"type": "text", "text": "What is it?"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, user({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, TEXT)),
    "chat with a text": (CHAT, user({"type": "image_url", "image_url": URL}, TEXT)),
    "responses": (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                        {"type": "input_text", "text": "What is it?"},
                    ],
                }
            ]
        },
    ),
    "anthropic": (MESSAGES, user({"type": "image", "source": SOURCE}, TEXT)),
    "ollama": (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "What is it?", "images": [BASE64]}],
            "stream": False,
        },
    ),
    "ollama with a prompt": (
        "/api/generate",
        {"prompt": "What is it?", "images": [URL], "stream": False},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_image_stands_in_the_prompt(model: SeeingModel, name: str) -> None:
    status, told = asked(model, *BODIES[name])
    assert status == 200, told
    messages, read = model.read_pictures(
        [{"role": "user", "content": [{"type": "image", "image": FILE}, TEXT]}]
    )
    assert read is not None
    ids = model.tokenizer.encode_chat(messages, pictures=read)
    assert model.prompts == [ids]
    assert sum(map(is_row, ids)) == 4
    assert [tile.digest for tile in model.tiles[0]] == [each.digest for each in read.tiles]


_CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
OF_TOOLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "openai": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
                {
                    "role": "tool",
                    "tool_call_id": "c",
                    "content": [TEXT, {"type": "image_url", "image_url": {"url": URL}}],
                },
            ]
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [
                        {"type": "input_text", "text": "What is it?"},
                        {"type": "input_image", "image_url": URL},
                    ],
                },
            ]
        },
    ),
    "anthropic": (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [TEXT, {"type": "image", "source": SOURCE}],
                        }
                    ],
                },
            ],
        },
    ),
    "ollama": (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
                {"role": "tool", "content": "What is it?", "images": [BASE64]},
            ],
            "stream": False,
        },
    ),
}


@pytest.mark.parametrize("name", OF_TOOLS)
def test_an_image_of_a_tools_result_is_seen(model: SeeingModel, name: str) -> None:
    status, told = asked(model, *OF_TOOLS[name])
    assert status == 200, told
    (ids,) = cast(Any, model.prompts)
    assert sum(map(is_row, ids)) == 4
    text = model.tokenizer.decode([id for id in ids if not is_row(id)])
    assert text.index("tool\n") < text.index("What is it?")


@pytest.mark.parametrize("name", OF_TOOLS)
def test_a_model_that_reads_no_images_is_told_of_those_of_tools(
    model: SeeingModel, name: str
) -> None:
    held = SimpleNamespace(name="m", picture_reader=None)
    model.read_pictures = partial(read_pictures, cast(LoadedModel, held))
    status, told = asked(model, *OF_TOOLS[name])
    assert status == 200, told
    assert NOT_SEEN in model.tokenizer.decode(model.prompts[0])


def test_tokens_of_images_are_counted(model: SeeingModel) -> None:
    _path, body = BODIES["anthropic"]
    status, told = asked(model, "/v1/messages/count_tokens", body)
    assert status == 200
    asked(model, MESSAGES, body)
    assert told["input_tokens"] == len(cast(Any, model.prompts[0]))


def test_neighbours_are_joined_with_their_images() -> None:
    image = {"type": "image", "image": FILE}
    said: list[dict[str, object]] = [
        {"role": "user", "content": "One."},
        {"role": "user", "content": [image, TEXT]},
        {"role": "user", "content": "Three."},
    ]
    between = {"type": "text", "text": "\n\n"}
    (message,) = turns(said, joins=True)
    assert message["content"] == [
        {"type": "text", "text": "One."},
        between,
        image,
        TEXT,
        between,
        {"type": "text", "text": "Three."},
    ]


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ({"type": "image_url"}, "content[0].image_url is missing"),
        ({"type": "image_url", "image_url": {}}, "content[0].image_url.url is missing"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "a picture's data URL is invalid"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "data URL is invalid"),
        ({"type": "image_url", "image_url": "data:image/png;base64,=?"}, "not valid base64"),
        ({"type": "image_url", "image_url": "data:;base64,aGk="}, "the picture cannot be read"),
        ({"type": "image", "image": "/etc/passwd"}, "is 'image'; only text and a user's images"),
        ({"type": "input_image", "file_id": "f"}, "this server stores none; give a data URL"),
        ({"type": "video_url", "video_url": {"url": URL}}, "is 'video_url'; only text and"),
        ({"type": "image_url", "image_url": "https://a.example/b.png"}, "serve with --fetch-image"),
    ],
)
def test_other_images_are_refused(model: SeeingModel, part: Any, cause: str) -> None:
    status, told = asked(model, CHAT, user(part, TEXT))
    assert status == 400
    assert cause in told["error"]["message"]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (None, "source is missing"),
        ({"type": "file", "file_id": "f"}, "is 'file'; give the image as base64"),
        ({"type": "base64", "data": 3}, "data must be a text in base64"),
        ({"type": "url", "url": "https://a.example/b.png"}, "this server downloads none"),
    ],
)
def test_other_images_of_anthropic_are_refused(model: SeeingModel, source: Any, cause: str) -> None:
    status, told = asked(model, MESSAGES, user({"type": "image", "source": source}, TEXT))
    assert status == 400
    assert cause in told["error"]["message"]


def test_images_of_others_than_users_are_refused(model: SeeingModel) -> None:
    image = {"type": "image_url", "image_url": URL}
    body = {"messages": [{"role": "system", "content": [image]}, *user(TEXT)["messages"]]}
    status, told = asked(model, CHAT, body)
    assert (status, "only text and a user's images" in told["error"]["message"]) == (400, True)
    message = {"role": "assistant", "content": "Hm", "images": [BASE64]}
    status, told = asked(model, "/api/chat", {"messages": [message], "stream": False})
    assert (status, "images is for messages of the user" in told["error"]) == (400, True)


def test_a_model_that_reads_no_images_says_so(model: SeeingModel) -> None:
    held = SimpleNamespace(name="m", picture_reader=None)
    model.read_pictures = partial(read_pictures, cast(LoadedModel, held))
    status, told = asked(model, *BODIES["chat"])
    assert (status, "m reads no images; leave them out" in told["error"]["message"]) == (400, True)


def test_ollamas_clients_are_told_of_a_model_that_reads_images(model: SeeingModel) -> None:
    async def told() -> set[str]:
        visit = Visit(model, CHAT, {})
        await visit.running
        return {*await visit.server._answers.capabilities(cast(AsyncModel, model))}

    assert "vision" in asyncio.run(told())
    model.reads_pictures = False
    assert "vision" not in asyncio.run(told())


def test_an_image_by_url_is_downloaded_where_that_is_allowed(model: SeeingModel) -> None:
    fetched: list[str] = []

    def fetch(url: str) -> bytes:
        fetched.append(url)
        return FILE

    image = {"type": "image_url", "image_url": {"url": "HTTPS://a.example/b.png"}}
    status, told = asked(model, CHAT, user(image, TEXT), fetch=fetch)
    assert (status, fetched) == (200, ["HTTPS://a.example/b.png"]), told
    assert len(model.tiles[0]) == 1
    source = {"type": "url", "url": "http://a.example/c.png"}
    status, _told = asked(model, MESSAGES, user({"type": "image", "source": source}), fetch=fetch)
    assert (status, fetched[1:]) == (200, ["http://a.example/c.png"])


class Pages(BaseHTTPRequestHandler):
    """Of a server on this machine."""

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if place.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", place.removeprefix("/to"))
            self.end_headers()
            return
        if place == "/round":
            self.send_response(302)
            self.send_header("Location", "/round")
            self.end_headers()
            return
        self.send_response(404 if place == "/none" else 200)
        self.end_headers()
        with_more = FILE + bytes((33 << 20) if place == "/large" else 0)
        with contextlib.suppress(OSError):  # the client has heard enough
            self.wfile.write(with_more)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


fetch_anywhere = partial(fetch_picture, allows=lambda _address: True)


def test_downloads_follow_redirects_and_have_limits(pages: str) -> None:
    assert fetch_anywhere(f"{pages}/a.png?b=c") == FILE
    assert fetch_anywhere(f"{pages}/to/a.png") == FILE
    for path, cause in (
        ("/none", "its server answered 404"),
        ("/large", "more than 32 MiB"),
        ("/round", "more than 3 redirects"),
    ):
        with pytest.raises(RequestError, match=f"an image could not be downloaded: .*{cause}"):
            fetch_anywhere(pages + path)


def test_downloads_do_not_reach_private_networks(pages: str) -> None:
    with pytest.raises(RequestError, match=r"127\.0\.0\.1 is not on the public internet"):
        fetch_picture(f"{pages}/a.png")
    asked_of: list[str] = []

    def first_only(address: Any) -> bool:
        asked_of.append(str(address))
        return len(asked_of) == 1

    with pytest.raises(RequestError, match="is not on the public internet"):
        fetch_picture(f"{pages}/to/a.png", allows=first_only)
    assert len(asked_of) == 2, "the redirect's, too"
    for url in ("ftp://a.example/b", "http:///b", "http://me:secret@127.0.0.1/b", "http://[::1"):
        with pytest.raises(RequestError, match="could not be downloaded"):
            fetch_anywhere(url)


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("2002:a00:1::1", False),
    ],
)
def test_which_addresses_are_public(address: str, is_one: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is is_one


def test_a_slow_download_is_given_up(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_S", 0.0)
    with pytest.raises(RequestError, match="it did not come within 0 s"):
        fetch_anywhere(f"{pages}/a.png")
