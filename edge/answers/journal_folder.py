"""The folder of journals: one for each unfinished reply, private to its user."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge.answers.journal import Journal, read_journal
from edge.answers.journal_records import JournalContent, JournalHead
from edge.errors import RequestError, shown
from edge.protocol.lease import Lease
from edge.system.files import open_private
from edge.system.locks import lock_now

LAST = "last"
"""In place of an id: the reply that was written to last."""

MOST_REPLIES = 64
"""Most journals in the folder. The oldest are removed, except those that are open."""

_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)
_SUFFIX = ".reply"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One journal of the folder."""

    id: str
    path: Path
    written_s: float
    """Wall-clock time of its last token."""
    nbytes: int
    is_under_way: bool
    """Some process has it open."""


class JournalFolder:
    """The journals in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, head: JournalHead, lease: Lease) -> Journal | None:
        """A new journal. Returns None, with a warning, where none can be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._remove_oldest()
            while True:
                path = self._folder / f"{secrets.token_hex(4)}{_SUFFIX}"
                with contextlib.suppress(FileExistsError):
                    journal = Journal.begin(path, head, lease, _log.warning)
                    return journal if journal.is_open else None
        except OSError as error:
            why = error.strerror or error
            _log.warning(
                "the answer is not kept, as %s cannot be used (%s): set EDGE_STATE to another "
                "folder, or give --no-journal",
                self._folder,
                why,
            )
            return None

    def open(self, id: str) -> Journal:
        """Open one to resume its reply. Raises RequestError if there is none, or if another process
        has it open."""
        entries = self.entries()
        if id == LAST:
            if not entries:
                raise RequestError(
                    "no reply is kept here, as those that were finished are not",
                    remedy="ask with journal=True for one that can be gone on with",
                )
            id = next((each.id for each in entries if not each.is_under_way), entries[0].id)
        try:
            if _ID.fullmatch(id):
                return Journal.open(self._folder / f"{id}{_SUFFIX}", _log.warning)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RequestError(
                f"the reply {id} cannot be opened: {error.strerror}", remedy="ask again"
            ) from error
        raise RequestError(
            f"no reply {shown(id)} is kept here: one that was finished is not",
            remedy="`edge replies show` lists those that are",
        )

    def entries(self) -> list[JournalEntry]:
        """All journals, the one that was written to last first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.glob(f"*{_SUFFIX}"):
                with contextlib.suppress(OSError):
                    status = path.stat(follow_symlinks=False)
                    if _ID.fullmatch(path.stem):
                        entry = JournalEntry(
                            id=path.stem,
                            path=path,
                            written_s=status.st_mtime,
                            nbytes=status.st_size,
                            is_under_way=_is_locked(path),
                        )
                        found.append(entry)
        return sorted(found, key=lambda each: -each.written_s)

    def read(self) -> Iterator[tuple[JournalEntry, JournalContent | RequestError]]:
        """Each journal with its content, or the error of reading it."""
        for entry in self.entries():
            try:
                yield entry, read_journal(entry.path)
            except RequestError as error:
                yield entry, error
            except FileNotFoundError:
                pass  # it was finished meanwhile

    def remove(self, ids: set[str]) -> int:
        """Remove those that are not open; returns how many were removed."""
        removed = 0
        for entry in self.entries():
            if entry.id in ids and not entry.is_under_way:
                with contextlib.suppress(FileNotFoundError):
                    entry.path.unlink()
                    removed += 1
        return removed

    def _remove_oldest(self) -> None:
        if sum(1 for _ in self._folder.glob(f"*{_SUFFIX}")) >= MOST_REPLIES:
            entries = self.entries()
            idle = [entry.id for entry in entries if not entry.is_under_way]
            self.remove(set(idle[max(0, len(idle) - (len(entries) - MOST_REPLIES + 1)) :]))


def _is_locked(path: Path) -> bool:
    descriptor = open_private(path, os.O_RDONLY)
    try:
        return not lock_now(descriptor, is_shared=True)
    finally:
        os.close(descriptor)
