"""The messages of a conversation, and their file. Pure but for that file."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.errors import RequestError, shown
from edge.host.home import expanded
from edge.offload import StoreError, parse_json, read_file, write_durably

_FORMAT = "edge conversation"
_MOST_FILE_BYTES = 64 << 20
_URL = "data:;base64,"
_MODE = 0o600
"""Readable by the user only: conversations are private."""
_ROLES = ("user", "assistant")

Turn = dict[str, Any]
"""A role, a content, and perhaps images: data URLs."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The turns of user and model, and the system message."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Turn]:
        """The messages for `edge.Model.chat`."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *map(_message, self.turns)]

    def ask(self, question: str, images: Sequence[bytes] = ()) -> None:
        """images: files of the pictures that the question is about."""
        turn: Turn = {"role": "user", "content": question}
        if images:
            turn["images"] = [_URL + base64.b64encode(each).decode() for each in images]
        self.turns.append(turn)

    def answered(self, answer: str) -> None:
        self.turns.append({"role": "assistant", "content": answer})

    def forget_answer(self) -> bool:
        """Remove the last answer, so that its question is asked again. False: there is none."""
        if not self.turns or self.turns[-1]["role"] != "assistant":
            return False
        self.turns.pop()
        return True

    def forget_question(self) -> None:
        """Remove a question that was not answered."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def save(self, path: Path, *, model: str) -> None:
        """Write the file. Raises RequestError if that fails, or if the file is not a
        conversation."""
        path = path.resolve()
        if path.exists() and not _holds_one(path):
            raise RequestError(
                f"{path} exists already and is no conversation", remedy="name another file"
            )
        value = {"format": _FORMAT, "model": model, "system": self.system, "turns": self.turns}
        try:
            content = json.dumps(value, indent=2, ensure_ascii=False).encode()
            write_durably(path, content, mode=_MODE)
        except StoreError as error:
            raise RequestError(str(error), remedy="name another file") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """The conversation in a file. Raises RequestError if it has none."""
        try:
            value = parse_json(read_file(expanded(path), _MOST_FILE_BYTES))
        except OSError as error:
            raise RequestError(
                f"{path} cannot be read ({error.strerror or error})",
                remedy="name a file that /save wrote",
            ) from error
        except ValueError as error:
            raise RequestError(
                f"{path} is no conversation: {error}", remedy="name a file that /save wrote"
            ) from error
        if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
            raise RequestError(f"{path} is no conversation", remedy="/save writes one")
        check_text(json.dumps(value, ensure_ascii=False))
        system, turns = value.get("system"), value.get("turns")
        if (
            not (system is None or isinstance(system, str))
            or not isinstance(turns, list)
            or not _are_turns(turns)
        ):
            raise RequestError(
                f"{path} is damaged: its turns are {shown(turns)}", remedy="save it again"
            )
        kept = ("role", "content", "images")
        return cls(
            system=system,
            turns=[{name: each[name] for name in kept if name in each} for each in turns],
        )


def _message(turn: Turn) -> Turn:
    """The message of a turn, in which its images come first."""
    if "images" not in turn:
        return turn
    parts = [{"type": "image", "image": each} for each in turn["images"]]
    if turn["content"]:
        parts.append({"type": "text", "text": turn["content"]})
    return {"role": turn["role"], "content": parts}


def check_text(text: str) -> None:
    """Raises RequestError for lone surrogates, which no file or model takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the text must be of valid Unicode characters") from error


def _holds_one(path: Path) -> bool:
    try:
        Conversation.load(path)
    except RequestError:
        return False
    return True


def _are_turns(values: list[Any]) -> bool:
    """Whether questions and answers alternate, and the last question is answered."""
    return len(values) % 2 == 0 and all(
        isinstance(each, Mapping)
        and each.get("role") == _ROLES[number % 2]
        and isinstance(each.get("content"), str)
        and _are_images(each.get("images", []))
        for number, each in enumerate(values)
    )


def _are_images(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(each, str) and each.startswith(_URL) for each in values
    )
