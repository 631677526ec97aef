"""Copies of the keys and values of answers, which a coordinator keeps should this peer be lost.

An answer is computed token by token, and so it would be once more: a copy of what each token left
spares that. Prompts are computed again faster; theirs are copied where that is asked for, too.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.protocol.assignment import COPIED_TOKENS, Copies
from edge.protocol.frame_codec import Event
from edge.protocol.messages import MOST_COPY_BYTES, CopiedTokens, KvRows
from edge.protocol.step import Step, StepEntry
from edge.transport.frame import Buffer

LEAST_COPIED_TOKENS = 8
"""Fewest tokens in one copy where keys and values are large, as far as a frame takes them."""

CHUNK_COPY_BYTES = MOST_COPY_BYTES // 2
"""About the size of one copy of a chunk of a prompt."""

COPIED_AFTER_S: Mapping[Copies, float] = {"answers": 0.5, "all": 0.05}
"""Then fewer are, by what is copied: what is not has to be computed again, as long as that took.
Whoever asked for all wants a short pause; else it is to cost nothing while nothing is lost."""

MOST_UNSENT_BYTES = 4 << 20
"""Copies that wait to be sent, of all sessions of a device. Where its link is slower than that,
tokens are copied later."""

MOST_UNSENT_OF_ALL_BYTES = 16 << 20


class CopyRooms:
    """How much may wait to be sent, of each device and of all. For all threads."""

    def __init__(
        self, of_one: int = MOST_UNSENT_BYTES, of_all: int = MOST_UNSENT_OF_ALL_BYTES
    ) -> None:
        self._lock = threading.Lock()
        self._of_one = of_one
        self._free = of_all
        self._held: Counter[object] = Counter()

    @property
    def held(self) -> int:
        """By all together."""
        return self._held.total()

    def of(self, owner: object) -> CopyRoom:
        """For one of its connections."""
        return CopyRoom(self, owner)

    def take(self, owner: object, num_bytes: int) -> bool:
        """Whether there is room; then it is taken."""
        with self._lock:
            if num_bytes > min(self._free, self._of_one - self._held[owner]):
                return False
            self._held[owner] += num_bytes
            self._free -= num_bytes
            return True

    def give_back(self, owner: object, num_bytes: int) -> None:
        with self._lock:
            self._held[owner] -= num_bytes
            self._free += num_bytes
            if not self._held[owner]:
                del self._held[owner]


class CopyRoom:
    """What the sessions of one connection have of it."""

    def __init__(self, rooms: CopyRooms, owner: object) -> None:
        self._rooms = rooms
        self._owner = owner
        self._held = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Whether there is room; then it is taken."""
        with self._lock:
            takes = self._rooms.take(self._owner, num_bytes)
            self._held += num_bytes if takes else 0
            return takes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._held -= num_bytes
            self._rooms.give_back(self._owner, num_bytes)

    def give_back_all(self) -> None:
        """What is not sent never is."""
        self.give_back(self._held)


class RowStorage(Protocol):
    """What it needs of `KvStorage`."""

    def new_rows(self, tokens: int) -> list[NDArray[Any]]: ...

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None: ...

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None: ...


class KvCopies:
    """Copies the keys and values of one shard's requests; used from the compute thread, but for
    `begin`."""

    def __init__(
        self, report: Callable[[Event], None], room: CopyRoom, copies: Copies = "all"
    ) -> None:
        self._report = report
        self._after_s = COPIED_AFTER_S[copies]
        self._enough = COPIED_TOKENS[copies]
        self._room = room
        self._next: dict[str, int] = {}
        """By request, the first token that is not copied."""
        self._copied_s: dict[str, float] = {}
        """By request, when it was copied last."""
        self._restored: dict[str, int] = {}
        """By request that has not begun, the tokens that were restored of it."""

    def begin(self, request: str, first: int) -> None:
        """A request that is copied from this token on, or from what was restored of it."""
        self._next[request] = max(first, self._restored.pop(request, 0))

    def forget(self, request: str) -> None:
        """The request is over; unknown ones are ignored."""
        self._next.pop(request, None)
        self._copied_s.pop(request, None)
        self._restored.pop(request, None)

    def restored(self, request: str, last: int) -> None:
        """Who keeps the copies has them up to this token."""
        (self._next if request in self._next else self._restored)[request] = last

    def take(self, step: Step, program: RowStorage, *, now_s: float) -> None:
        """Copy what steps have left of answers, once that is enough, or has waited for long;
        `KvRows` are reported, of as many requests at once as there is room for in a frame."""
        parts: list[CopiedTokens] = []
        rows: list[NDArray[np.uint8]] = []
        num_bytes = 0
        for entry in step.entries:
            while (copied := self._copied(entry, program, now_s)) is not None:
                part, of_part = copied
                if num_bytes + of_part.nbytes > MOST_COPY_BYTES:
                    self._tell(parts, rows)
                    parts, rows, num_bytes = [], [], 0
                parts.append(part)
                rows.append(of_part)
                num_bytes += of_part.nbytes
        if parts:
            self._tell(parts, rows)

    def _tell(self, parts: Sequence[CopiedTokens], rows: Sequence[NDArray[np.uint8]]) -> None:
        self._report(KvRows(parts=tuple(parts), rows=b"".join(each.data for each in rows)))

    def _copied(
        self, entry: StepEntry, program: RowStorage, now_s: float
    ) -> tuple[CopiedTokens, NDArray[np.uint8]] | None:
        """Some of its tokens [tokens, bytes], if there are enough to copy, and room."""
        request = entry.request
        first = self._next.get(request)
        if first is None or entry.end <= first:
            return None
        tokens = entry.end - first
        waits = now_s - self._copied_s.setdefault(request, now_s) < self._after_s
        if tokens < self._enough and waits:
            return None
        if len(entry.tokens) == 1:
            tokens = min(self._enough, tokens)
        rows = program.rows(request, first, first + tokens)
        if not rows:
            return None
        num_bytes = sum(each.nbytes for each in rows)
        if (most := tokens * MOST_COPY_BYTES // num_bytes) == 0:
            self.forget(request)  # no frame takes even one token
            return None
        if num_bytes > CHUNK_COPY_BYTES:
            wanted = max(LEAST_COPIED_TOKENS, tokens * CHUNK_COPY_BYTES // num_bytes)
            tokens = min(tokens, most, wanted)
            self._enough = min(self._enough, most, wanted)
            rows = [each[:, :tokens] for each in rows]
            num_bytes = sum(each.nbytes for each in rows)
        if not self._room.take(num_bytes):
            return None
        self._next[request] = first + tokens
        self._copied_s[request] = now_s
        return CopiedTokens(request=request, first=first, tokens=tokens), _by_token(rows)


def _by_token(rows: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """[tokens, bytes] of what is [heads, tokens, elements] for each layer's keys and values."""
    tokens = rows[0].shape[1]
    alike = [
        # In few calls: most models have many layers of one shape.
        np.concatenate(list(some)).swapaxes(0, 1).reshape(tokens, -1).view(np.uint8)
        for _, some in itertools.groupby(rows, lambda each: (each.dtype, each.shape[2]))
    ]
    return alike[0] if len(alike) == 1 else np.concatenate(alike, axis=1)


def put_copy(program: RowStorage, request: str, first: int, tokens: int, rows: Buffer) -> None:
    """Let the request have the keys and values of these tokens, which follow what it has.

    Raises RequestError for rows of another size, or of a request that has others.
    """
    into = program.new_rows(tokens)
    if sum(each.nbytes for each in into) != len(rows):
        raise RequestError(f"{len(rows)} bytes of keys and values for {tokens} tokens")
    # The next token's are not there yet, those of the one before are.
    if program.rows(request, first, first + 1) is not None or (
        first and program.rows(request, first - 1, first) is None
    ):
        raise RequestError("keys and values that do not follow those that there are")
    _fill(into, rows)
    program.put_rows(request, first, into)


def _fill(arrays: Sequence[NDArray[Any]], rows: Buffer) -> None:
    tokens = arrays[0].shape[1]
    by_token = np.frombuffer(rows, np.uint8).reshape(tokens, -1)
    start = 0
    for each in arrays:
        heads, _, elements = each.shape
        stop = start + heads * elements * each.itemsize
        # A copy: other types need another alignment.
        part = by_token[:, start:stop].tobytes()
        each[...] = np.frombuffer(part, each.dtype).reshape(tokens, heads, elements).swapaxes(0, 1)
        start = stop
