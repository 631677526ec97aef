"""/v1/audio/transcriptions: reads a form with a sound, and writes OpenAI's reply."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from edge.server.refusals import Refusal

_MOST_FIELDS = 32
_FORMATS = ("json", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """A sound whose words are asked for."""

    sound: bytes
    """A WAV file."""
    model: str | None
    language: str | None
    as_text: bool


def transcription_asked(content_type: str, body: bytes) -> TranscriptionRequest:
    """Reads multipart/form-data: `file`, and `model`, `language`, `response_format`.

    Raises Refusal for another body, and for fields that are not supported.
    """
    fields = _form(content_type, body)
    if not fields.get("file"):
        raise Refusal(400, "file is missing; give a WAV file as a field of a form")
    texts = {}
    for name, value in fields.items():
        if name == "file":
            continue
        try:
            texts[name] = value.decode().strip()
        except UnicodeDecodeError as error:
            raise Refusal(400, f"{name} is not UTF-8 text") from error
    asked = texts.pop("response_format", "json")
    if asked not in _FORMATS:
        raise Refusal(400, f"response_format must be one of {', '.join(_FORMATS)}")
    try:
        temperature = float(texts.pop("temperature", "") or 0)
    except ValueError as error:
        raise Refusal(400, "temperature must be a number") from error
    if temperature:
        raise Refusal(400, "temperature must be 0: words are those that are most likely")
    found = TranscriptionRequest(
        sound=fields["file"],
        model=texts.pop("model", None),
        language=texts.pop("language", None) or None,
        as_text=asked == "text",
    )
    if texts:
        raise Refusal(400, f"{min(texts)!r:.80} is not supported")
    return found


def transcription_reply(text: str) -> dict[str, Any]:
    return {"text": text}


def _form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields of multipart/form-data (RFC 7578)."""
    boundary = re.match(r'multipart/form-data;.*boundary="?([^\s";]{1,70})"?', content_type, re.I)
    if boundary is None:
        raise Refusal(400, "the body must be multipart/form-data with a boundary")
    mark = b"\r\n--" + boundary[1].encode("latin-1")
    parts = (b"\r\n" + body).split(mark, _MOST_FIELDS + 2)
    if len(parts) > _MOST_FIELDS + 2 or not parts[-1].startswith(b"--"):
        raise Refusal(400, f"the form is truncated, or has more than {_MOST_FIELDS} fields")
    fields: dict[str, bytes] = {}
    for part in parts[1:-1]:
        head, gap, content = part.partition(b"\r\n\r\n")
        name = re.search(
            rb'^content-disposition:\s*form-data;.*?\bname="([^"]{1,80})"', head, re.I | re.M
        )
        if not gap or name is None:
            raise Refusal(400, "a field of the form has no name")
        if (key := name[1].decode("latin-1")) in fields:
            raise Refusal(400, f"the form has two fields {key!r}")
        fields[key] = content
    return fields
