"""Pictures in messages: a part {"type": "image", "image": …} of a content."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.errors import RequestError, shown
from edge.host.home import expanded
from edge.offload import read_file
from edge.pictures.decoder import MOST_FILE_BYTES
from edge.text.message_texts import PICTURE

MOST_PICTURES = 64
"""Most pictures of one conversation."""
_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*?;base64,", re.IGNORECASE)
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_EXAMPLE = '{"type": "image", "image": "photo.jpg"}'

NOT_SEEN = "(Here is a picture or a file that you cannot read.)"
"""Text in place of parts of a tool's result that the model cannot read."""
_BELOW = "(This image is shown below.)"
_ABOVE = "Images in the results above:"

Message = Mapping[str, object]


def has_pictures(messages: Sequence[Message]) -> bool:
    """Whether a message has a part that is a picture."""
    return isinstance(messages, Sequence) and any(
        _is_picture(part) for message in messages for part in _parts(message)
    )


def without_results(messages: Sequence[Message]) -> list[Message]:
    """The messages with `NOT_SEEN` in the place of each picture of a tool's result: an agent would
    stop if they were refused."""
    return [_replaced(each, NOT_SEEN) if _is_result(each) else each for each in messages]


def with_results_behind(messages: Sequence[Message]) -> list[Message]:
    """The messages with the pictures of tools' results in a user's message behind these, for chat
    templates that leave pictures of results out."""
    found: list[Message] = []
    waiting: list[object] = []
    for message in (*messages, None):
        if message is not None and _is_result(message):
            waiting += filter(_is_picture, _parts(message))
            found.append(_replaced(message, _BELOW))
            continue
        if waiting and (message is None or message.get("role") != "tool"):
            shown_below = [{"type": "text", "text": _ABOVE}, *waiting]
            waiting = []
            if message is not None and message.get("role") == "user":
                said = message.get("content")
                own = [{"type": "text", "text": said}] if isinstance(said, str) else _parts(message)
                message = {**message, "content": [*shown_below, *own]}  # noqa: PLW2901
            else:
                found.append({"role": "user", "content": shown_below})
        if message is not None:
            found.append(message)
    return found


def _is_result(message: Message) -> bool:
    """Whether it is a tool's result with a picture."""
    is_there = isinstance(message, Mapping) and message.get("role") == "tool"
    return is_there and any(map(_is_picture, _parts(message)))


def _replaced(message: Message, words: str) -> Message:
    parts = [{"type": "text", "text": words} if _is_picture(p) else p for p in _parts(message)]
    return {**message, "content": parts}


def taken_out(messages: Sequence[Message]) -> tuple[list[Message], list[bytes]]:
    """The messages with a `PICTURE` in the place of each picture, and the pictures' files.

    Raises RequestError for a picture that cannot be read, and for too many.
    """
    files: list[bytes] = []

    def without(part: object) -> object:
        if not _is_picture(part):
            return part
        assert isinstance(part, Mapping), "a picture"
        if len(files) == MOST_PICTURES:
            raise RequestError(
                f"a conversation may have {MOST_PICTURES} pictures", remedy="leave some out"
            )
        files.append(file_of(part.get("image")))
        return PICTURE

    found: list[Message] = [
        {**each, "content": [without(part) for part in parts]} if (parts := _parts(each)) else each
        for each in messages
    ]
    return found, files


def _parts(message: Message) -> Sequence[object]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == PICTURE["type"]


def file_of(picture: Any) -> bytes:
    """The bytes of a picture's file: given as they are, by a path, a data URL, or a PIL.Image.

    Raises RequestError for others, and for files that cannot be read.
    """
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if isinstance(picture, str) and picture[:5].lower() == "data:":
        return bytes_of_url(picture)
    if isinstance(picture, str) and re.match(r"https?://", picture, re.IGNORECASE):
        raise RequestError(
            "a picture is given by a URL, and Edge downloads none",
            remedy="download it, and give the file",
        )
    if isinstance(picture, str | Path):
        return _read(Path(picture))
    if hasattr(picture, "save") and hasattr(picture, "getexif"):  # Pillow's, which is not imported
        return _saved(picture)
    raise RequestError(
        f"an image must be a path, bytes, a data URL or a PIL.Image, not {shown(picture)}",
        remedy=f"write {_EXAMPLE}",
    )


def bytes_of_url(url: str) -> bytes:
    """The bytes in a data URL. Raises RequestError for other URLs."""
    found = _DATA.match(url)
    if found is None:
        raise RequestError(
            "a picture's data URL is invalid", remedy="write data:image/png;base64,…"
        )
    return decoded_base64(url[found.end() :])


def decoded_base64(text: str) -> bytes:
    """The bytes of a picture in base64. Raises RequestError for invalid text."""
    if len(text) > MOST_FILE_BYTES * 4 // 3 + 4:
        raise RequestError(
            f"a picture has more than {MOST_FILE_BYTES >> 20} MiB", remedy="make it smaller"
        )
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"a picture is not valid base64 ({error})") from error


def _read(path: Path) -> bytes:
    try:
        return read_file(expanded(path), MOST_FILE_BYTES)
    except OSError as error:
        raise RequestError(
            f"the picture {path} cannot be read ({error.strerror or error})",
            remedy="name another file",
        ) from error
    except ValueError as error:
        raise RequestError(
            f"the picture {path} cannot be read: {error}", remedy="name another file"
        ) from error


def _saved(image: Any) -> bytes:
    """The file of Pillow's picture, without loss."""
    held = io.BytesIO()
    try:
        kept = image if image.mode in _PNG_MODES else image.convert("RGB")
        kept.save(held, "PNG", compress_level=1, exif=image.getexif())
    except Exception as error:  # of any decoder
        raise RequestError(f"a picture cannot be read: {error}", remedy="open it again") from error
    return held.getvalue()
