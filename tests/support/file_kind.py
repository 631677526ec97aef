"""One kind of file, for those who change it; and what they have in common."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge import partition
from edge.api.known_models import inspect
from edge.cli.inspect_view import show_inspection
from edge.errors import EdgeError
from edge.offload import StoreError

REFUSALS = (EdgeError, StoreError, partition.PlanError)
"""The project's own errors: what is not read ends in one of them, told in a few lines."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sound one, and who reads it."""

    sound: bytes
    read: Callable[[bytes], object]
    has_own_keys: bool = False
    """Made anew with each `Files`."""
    others: Sequence[bytes] = ()
    """That are sound, too."""


class replaced:
    """A file with another content for a while."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> None:
        self._sound = self._path.read_bytes()
        self._path.write_bytes(self._content)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._sound)


def as_object(content: bytes) -> dict[str, object]:
    """An object in JSON; an empty one for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def told(path: Path) -> None:
    """Whatever it is, `edge inspect` has printable lines of it, or a sentence.

    The lines of one in eight are drawn, which takes as long as all else.
    """
    try:
        found = inspect(path)
    except REFUSALS:
        return
    facts = json.dumps(found.to_json(template=True), allow_nan=False)
    if zlib.crc32(facts.encode()) % 8:
        return
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_inspection(found, given=str(path), template=True)
    assert all(map(str.isprintable, out.getvalue().split("\n")))
