"""Kept documents: texts that conversations begin with, by name, private to their user.

A document is the beginning of the system message (of the user's first message, for chat templates
that have none), so prompts with the same documents in the same order begin with the same tokens.
Peers then find the keys and values of these tokens in their prefix caches.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import RequestError, shown
from edge.offload.errors import StoreError
from edge.offload.files.durable import disk_errors_as_store_errors, write_durably

MOST_DOCUMENT_BYTES = 32 << 20
"""Largest text: longer ones fit into no context."""
MOST_DOCUMENTS = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SUFFIX = ".document"
_BETWEEN = "\n\n"

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A kept text."""

    name: str
    text: str
    model: str
    """The model that has computed it."""
    tokens: int
    """Number of its tokens in that model."""
    kept_s: float
    """Wall-clock time at which it was kept."""


class DocumentFolder:
    """The documents in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, name: str, text: str, *, model: str, tokens: int) -> Document:
        """Keep a text, in place of another one of this name.

        Raises RequestError for a bad name or too long a text, StoreError if the disk fails.
        """
        check_document(name, text)
        others = set(self.names()) - {name}
        if len(others) >= MOST_DOCUMENTS:
            raise RequestError(
                f"{MOST_DOCUMENTS} documents are kept already",
                remedy="`edge cache drop NAME` removes one",
            )
        kept = Document(name=name, text=text, model=model, tokens=tokens, kept_s=time.time())
        head = {"model": model, "tokens": tokens, "kept_s": kept.kept_s}
        with disk_errors_as_store_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = f"{json.dumps(head)}\n{text}".encode()
        write_durably(self._path(name), content, mode=0o600)
        return kept

    def read(self, name: str) -> Document:
        """A document by its name. Raises RequestError if none is kept, or its file is damaged."""
        try:
            if not _NAME.fullmatch(name):
                raise FileNotFoundError
            path = self._path(name)
            if path.stat().st_size > 2 * MOST_DOCUMENT_BYTES:
                raise ValueError("it is too long")
            head, _, text = path.read_bytes().decode().partition("\n")
            told = json.loads(head)
            return Document(
                name=name,
                text=text,
                model=str(told["model"]),
                tokens=int(told["tokens"]),
                kept_s=float(told["kept_s"]),
            )
        except FileNotFoundError:
            raise _unknown(name) from None
        except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
            raise RequestError(
                f"the document {name} cannot be read: {error}", remedy="keep it again"
            ) from error

    def names(self) -> list[str]:
        """Names of all documents, in order."""
        with contextlib.suppress(OSError):
            return sorted(
                path.name.removesuffix(_SUFFIX)
                for path in self._folder.glob(f"*{_SUFFIX}")
                if _NAME.fullmatch(path.name.removesuffix(_SUFFIX))
            )
        return []

    def remove(self, names: Collection[str]) -> None:
        """Remove documents. Raises RequestError, and removes none, if one is not kept."""
        kept = self.names()
        for name in names:
            if name not in kept:
                raise _unknown(name)
        for name in names:
            try:
                self._path(name).unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"{name} cannot be removed: {error.strerror}") from error

    def texts(self, names: Sequence[str]) -> list[str]:
        """The texts of these documents, in this order."""
        return [self.read(name).text for name in names]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


def _unknown(name: str) -> RequestError:
    return RequestError(
        f"no document {shown(name)} is kept here",
        remedy="`edge cache documents` lists them, `edge keep` keeps one",
    )


def check_document(name: str, text: str) -> None:
    """Raises RequestError for a bad name, or a text that cannot be kept."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{shown(name)} is no name of a document",
            remedy="take letters, digits, dots, dashes and underscores, at most 64",
        )
    if not text.strip():
        raise RequestError(f"the document {name} is empty")
    if len(text.encode()) > MOST_DOCUMENT_BYTES:
        raise RequestError(f"the document {name} is longer than {MOST_DOCUMENT_BYTES >> 20} MiB")


def after_documents(
    messages: Sequence[Message], texts: Sequence[str], *, role: str = "system"
) -> list[Message]:
    """The conversation with these texts at the beginning of its first message of this role. A
    message of the system is added where there is none."""
    if not texts:
        return list(messages)
    found = list(messages)
    if role == "system" and not (found and found[0].get("role") == role):
        found.insert(0, {"role": role, "content": ""})
    place = next((number for number, each in enumerate(found) if each.get("role") == role), None)
    if place is None:
        raise RequestError("the conversation has no message of the user, to begin with a document")
    content = found[place].get("content") or ""
    if isinstance(content, str):
        content = _BETWEEN.join([*texts, content] if content else texts)
    elif isinstance(content, Sequence):
        content = [{"type": "text", "text": _BETWEEN.join([*texts, ""])}, *content]
    found[place] = {**found[place], "content": content}
    return found


def text_after_documents(prompt: str, texts: Sequence[str]) -> str:
    """The prompt that continues from these texts."""
    return _BETWEEN.join([*texts, prompt])
