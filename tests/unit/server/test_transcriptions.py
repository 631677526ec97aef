"""A sound in a form, and the words that come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from edge.api.encoder_decoder import AsyncEncoderDecoder, GeneratedTokens
from edge.errors import RequestError
from edge.server.app import Server, Speech
from edge.server.guard import Rules
from edge.server.model_pool import ModelPool
from edge.server.refusals import Refusal
from edge.server.transcriptions import transcription_asked

TYPE = 'multipart/form-data; boundary="xyz"'
SOUND = b"RIFF\r\n--xy\r\n\r\n\x00\xff"


def form(fields: Mapping[str, bytes], end: bytes = b"--xyz--\r\n") -> bytes:
    return (
        b"".join(
            b'--xyz\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s\r\n'
            % (name.encode(), value)
            for name, value in fields.items()
        )
        + end
    )


class _Export:
    """A model that hears what it is sent."""

    takes_sound = True

    async def transcribe(self, sound: bytes, *, language: str | None) -> GeneratedTokens:
        assert sound == SOUND
        text = f"heard in {language}"
        return GeneratedTokens(token_ids=(1, 2), text=text, score=0.0, is_complete=True)


def answered(body: bytes, *, hears: bool = True) -> tuple[int, str]:
    """The status and the text of the reply."""
    export = cast(AsyncEncoderDecoder, _Export())
    speech = Speech(name="whisper", export=export) if hears else None
    sent: list[dict[str, Any]] = []

    async def load(_name: str, _whole: bool) -> Any:
        raise AssertionError("nobody asks")

    async def main() -> None:
        server = Server(ModelPool(["m"], load), rules=Rules(), speech=speech)
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if rest:
                return rest.pop()
            await asyncio.Event().wait()
            return {}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/audio/transcriptions",
            "raw_path": b"/v1/audio/transcriptions",
            "query_string": b"",
            "headers": [(b"content-type", TYPE.encode())],
        }
        await server.app(scope, cast(Any, receive), cast(Any, send))

    asyncio.run(main())
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent).decode()


def test_a_sound_has_words() -> None:
    fields = {"model": b"whisper-1", "file": SOUND, "language": b"de", "temperature": b"0"}
    status, text = answered(form(fields))
    assert (status, json.loads(text)) == (200, {"text": "heard in de"})
    assert answered(form({"file": SOUND, "response_format": b"text"})) == (200, "heard in None\n")
    status, text = answered(form({"file": SOUND, "model": b"gpt"}))
    assert status == 404
    assert "no speech model 'gpt'" in text
    status, text = answered(form({"file": SOUND}), hears=False)
    assert status == 404
    assert "edge serve --speech" in text


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        ("application/json", b"{}", "must be multipart/form-data"),
        (TYPE, form({"file": SOUND}, end=b""), "truncated"),
        (TYPE, form({"model": b"m"}), "file is missing"),
        (TYPE, form({"file": SOUND, "x": b"1"}), "'x' is not supported"),
        (TYPE, form({"file": SOUND, "model": b"\xff"}), "model is not UTF-8"),
        (TYPE, form({"file": SOUND, "temperature": b"1"}), "temperature must be 0"),
        (TYPE, form({"file": SOUND, "temperature": b"warm"}), "must be a number"),
        (TYPE, form({"file": SOUND, "response_format": b"srt"}), "one of json, text"),
        (TYPE, b"--xyz\r\n\r\nabc\r\n--xyz--", "has no name"),
        (TYPE, form({"file": SOUND}, end=form({"file": SOUND})), "two fields 'file'"),
        (TYPE, form({str(n): b"" for n in range(40)}), "more than 32 fields"),
    ],
)
def test_other_forms_are_refused(content_type: str, body: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        transcription_asked(content_type, body)


def test_an_export_that_takes_no_sound_is_refused_before_the_first_request() -> None:
    export = _Export()
    export.takes_sound = False
    with pytest.raises(RequestError, match="t5 takes no sound"):
        Speech(name="t5", export=cast(AsyncEncoderDecoder, export))
