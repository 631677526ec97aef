"""The journal of one answer: its terms and its tokens so far, in a file that outlives the process.

A file is lines, each with a checksum of all before it and of itself: first the terms, then the
tokens. It is only appended to, so a cut leaves a beginning, and the rest of the answer follows from
any beginning. So tokens are not made durable: the tokens that a power cut takes are computed again.
Writing a token took 3 µs, 14 with log probabilities.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from edge.answers.journal_records import (
    VERSION,
    Holder,
    JournalContent,
    JournalHead,
    SinglySpan,
    TogetherLine,
    TokenLine,
    parse_journal,
)
from edge.errors import ProtocolError, RequestError
from edge.kernels.sampling.logprobs import Logprobs
from edge.offload import read_file
from edge.protocol.fields import to_json
from edge.protocol.lease import Lease
from edge.protocol.step import FinishReason
from edge.scheduling.prefixes import Spans
from edge.system.files import is_own, open_private, others_may
from edge.system.locks import lock, lock_now

MOST_BYTES = 64 << 20
"""Size limit of a file. A token takes 16 bytes, or 600 with its 20 likeliest tokens; a picture of
the prompt up to 3 MB. A longer answer has only its beginning in its journal."""


def read_journal(path: Path) -> JournalContent:
    """The content of a journal.

    Raises RequestError, saying what is wrong, for a file that is no journal, that other users can
    read, or that cannot be read; FileNotFoundError where there is none.
    """
    try:
        _check_private(path.stat(follow_symlinks=False))
        return parse_journal(read_file(path, MOST_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, ProtocolError) as error:
        raise RequestError(
            f"the reply in {path} cannot be gone on with: {error}",
            remedy="remove the file, or ask again",
        ) from error


def _check_private(status: os.stat_result) -> None:
    if not is_own(status) or others_may(status, 0o077):
        raise ValueError("others may read or write it, until it is yours and chmod 600")


def _holder(path: Path) -> str:
    """The process that has it open, if the file names it yet."""
    try:
        return f"process {read_journal(path).pid}"
    except (RequestError, FileNotFoundError):
        return "another process"


class Journal:
    """The open file of one answer, locked by this process. May be used from any thread.

    If a line cannot be written, as on a full disk, it and all later lines are left out, and
    `on_fail` is told once. The answer itself goes on.
    """

    def __init__(
        self, path: Path, descriptor: int, content: JournalContent, on_fail: Callable[[str], None]
    ) -> None:
        """Use `begin` or `open`. Takes over the descriptor."""
        self.path = path
        self.content = content
        """The content when it was opened."""
        self._descriptor = descriptor
        self._checksum, self._bytes = content.checksum, content.whole_bytes
        self._on_fail = on_fail
        self.is_open = self._is_writing = True
        self._is_together = content.ends_together
        self._mutex = threading.Lock()

    @property
    def id(self) -> str:
        """Its name in the folder."""
        return self.path.stem

    @classmethod
    def begin(
        cls, path: Path, head: JournalHead, lease: Lease, on_fail: Callable[[str], None]
    ) -> Journal:
        """Create the file. Raises OSError where that fails, FileExistsError where it exists."""
        descriptor = open_private(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND)
        try:
            lock(descriptor)
            content = JournalContent(
                head=head,
                lease=lease,
                pid=os.getpid(),
                tokens=(),
                singly=(),
                together=(),
                ends_together=False,
                whole_bytes=0,
                checksum=0,
            )
            journal = cls(path, descriptor, content, on_fail)
        except BaseException:
            os.close(descriptor)
            raise
        journal._append({"edge_reply": VERSION, **to_json(head)})
        journal.held_by(lease)
        if not journal._is_writing:
            journal.remove()  # a part of the terms is of no use
        return journal

    @classmethod
    def open(cls, path: Path, on_fail: Callable[[str], None]) -> Journal:
        """Open it to go on with the answer, one lease term later, which is durable on return.

        Raises RequestError if another process has it open, naming that process, and the errors of
        `read_journal`.
        """
        descriptor = open_private(path, os.O_RDWR | os.O_APPEND)
        try:
            if not lock_now(descriptor):
                raise RequestError(
                    f"{_holder(path)} has this reply under way", remedy="wait for it, or end it"
                )
            content = read_journal(path)
            journal = cls(path, descriptor, content, on_fail)
            os.ftruncate(descriptor, content.whole_bytes)
            journal.held_by(replace(content.lease, term=content.lease.term + 1))
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def held_by(self, lease: Lease) -> None:
        """Write that this process computes the answer from here on."""
        self.content = replace(self.content, lease=lease, pid=os.getpid())
        self._append(to_json(Holder(lease=lease, pid=os.getpid())))

    def begun(self, singly: Spans) -> None:
        """Write, before the first token, how the prompt was computed; see `Answer.singly`."""
        for span in singly:
            self._append(to_json(SinglySpan(singly=span)))

    def token(
        self,
        token_id: int,
        end: FinishReason | None,
        logprobs: Logprobs | None,
        *,
        together: bool = False,
    ) -> None:
        """Append the next token. together: it comes of a step with guesses."""
        if together != self._is_together:
            self._append(to_json(TogetherLine(together=together)))
            self._is_together = together
        if end is None and logprobs is None:
            self._append(token_id)
            return
        self._append(to_json(TokenLine.of(token_id, end, logprobs)))

    def close(self) -> None:
        """Close it; the answer can be resumed later. May be called again."""
        with self._mutex:
            if self.is_open:
                self.is_open = self._is_writing = False
                os.close(self._descriptor)

    def remove(self) -> None:
        """Delete it. Where that fails, `on_fail` is told."""
        why = ""
        with self._mutex:
            if self.is_open:
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as error:
                    why = error.strerror or str(error)
        self.close()
        if why:
            self._on_fail(f"{self.path} stays there, though nobody needs it any more: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, value: object) -> None:
        body = json.dumps(value).encode()
        with self._mutex:
            if not self._is_writing:
                return
            checksum = zlib.crc32(body, self._checksum)
            line = b"%08x %s\n" % (checksum, body)
            why = ""
            if self._bytes + len(line) > MOST_BYTES:
                why = f"it is longer than {MOST_BYTES >> 20} MiB"
            else:
                try:
                    if os.write(self._descriptor, line) < len(line):
                        why = "the disk is full"
                except OSError as error:
                    why = error.strerror or str(error)
            self._checksum, self._bytes = checksum, self._bytes + len(line)
            self._is_writing = not why
        if why:
            self._on_fail(f"the rest of the answer is not kept in {self.path}: {why}")
