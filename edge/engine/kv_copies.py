"""Copies of keys and values, sent to the coordinator in case this peer is lost (failover).

After a loss an answer would be computed again token by token; its copies save that. Prompts are
recomputed faster, and are copied only with `copies="all"`.
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
from edge.protocol.frame_codec import MOST_COPY_BYTES, Event
from edge.protocol.kv_frames import CopiedTokens, KvRows
from edge.protocol.step import Step, StepEntry
from edge.transport.frame import Buffer

LEAST_COPIED_TOKENS = 8
"""Fewest tokens in one copy of large keys and values, if a frame holds them."""

CHUNK_COPY_BYTES = MOST_COPY_BYTES // 2
"""Approximate size of one copy of a chunk of a prompt."""

COPIED_AFTER_S: Mapping[Copies, float] = {"answers": 0.5, "all": 0.05}
"""Seconds after which fewer tokens are copied. Tokens without a copy must be recomputed, which
takes as long. "all" asks for short pauses; "answers" must cost nothing without a loss."""

MOST_UNSENT_BYTES = 4 << 20
"""Unsent copies of all sessions of one device. On a slower link, tokens are copied later."""

MOST_UNSENT_OF_ALL_BYTES = 16 << 20


class KvCopyQuota:
    """Limits of the bytes of unsent copies, for each device and for all together. Thread-safe."""

    def __init__(
        self, of_one: int = MOST_UNSENT_BYTES, of_all: int = MOST_UNSENT_OF_ALL_BYTES
    ) -> None:
        self._lock = threading.Lock()
        self._of_one = of_one
        self._free = of_all
        self._held: Counter[object] = Counter()

    @property
    def held(self) -> int:
        """Bytes of all owners together."""
        return self._held.total()

    def of(self, owner: object) -> KvCopyQuotaShare:
        """The share of one connection."""
        return KvCopyQuotaShare(self, owner)

    def take(self, owner: object, num_bytes: int) -> bool:
        """Take `num_bytes` if they fit; returns whether they did."""
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


class KvCopyQuotaShare:
    """The bytes of unsent copies that one connection holds of the quota. Thread-safe."""

    def __init__(self, quota: KvCopyQuota, owner: object) -> None:
        self._quota = quota
        self._owner = owner
        self._held = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes` if they fit; returns whether they did."""
        with self._lock:
            takes = self._quota.take(self._owner, num_bytes)
            self._held += num_bytes if takes else 0
            return takes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._held -= num_bytes
            self._quota.give_back(self._owner, num_bytes)

    def give_back_all(self) -> None:
        """Call it when nothing more will be sent."""
        self.give_back(self._held)


class RowStorage(Protocol):
    """The methods of `KvStorage` that copies need."""

    def new_rows(self, tokens: int) -> list[NDArray[Any]]: ...

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None: ...

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None: ...


class KvCopies:
    """Copies the keys and values of one shard's requests. Called from the compute thread, except
    `begin`."""

    def __init__(
        self, report: Callable[[Event], None], quota: KvCopyQuotaShare, copies: Copies = "all"
    ) -> None:
        self._report = report
        self._after_s = COPIED_AFTER_S[copies]
        self._enough = COPIED_TOKENS[copies]
        self._quota = quota
        self._next: dict[str, int] = {}
        """By request, the first token without a copy."""
        self._copied_s: dict[str, float] = {}
        """By request, the time of its last copy."""
        self._restored: dict[str, int] = {}
        """By request that has not begun, its restored tokens."""

    def begin(self, request: str, first: int) -> None:
        """Copy a request from token `first` on, or from the end of its restored tokens."""
        self._next[request] = max(first, self._restored.pop(request, 0))

    def forget(self, request: str) -> None:
        """Remove a request. Unknown ones are ignored."""
        self._next.pop(request, None)
        self._copied_s.pop(request, None)
        self._restored.pop(request, None)

    def restored(self, request: str, last: int) -> None:
        """The coordinator has copies up to token `last`."""
        (self._next if request in self._next else self._restored)[request] = last

    def take(self, step: Step, program: RowStorage, *, now_s: float) -> None:
        """Copy new tokens of the step's requests, once there are enough or they have waited too
        long. Reports `KvRows`, each with as many requests as fit in a frame."""
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
        """Copied rows [tokens, bytes] of one request, if there are enough tokens and memory."""
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
            self.forget(request)  # a single token does not fit in a frame
            return None
        if num_bytes > CHUNK_COPY_BYTES:
            wanted = max(LEAST_COPIED_TOKENS, tokens * CHUNK_COPY_BYTES // num_bytes)
            tokens = min(tokens, most, wanted)
            self._enough = min(self._enough, most, wanted)
            rows = [each[:, :tokens] for each in rows]
            num_bytes = sum(each.nbytes for each in rows)
        if not self._quota.take(num_bytes):
            return None
        self._next[request] = first + tokens
        self._copied_s[request] = now_s
        return CopiedTokens(request=request, first=first, tokens=tokens), _by_token(rows)


def _by_token(rows: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """Join rows [heads, tokens, elements] of each layer's keys and values to [tokens, bytes]."""
    tokens = rows[0].shape[1]
    alike = [
        # Few calls: most models have many layers of one shape.
        np.concatenate(list(some)).swapaxes(0, 1).reshape(tokens, -1).view(np.uint8)
        for _, some in itertools.groupby(rows, lambda each: (each.dtype, each.shape[2]))
    ]
    return alike[0] if len(alike) == 1 else np.concatenate(alike, axis=1)


def put_copy(program: RowStorage, request: str, first: int, tokens: int, rows: Buffer) -> None:
    """Restore keys and values of tokens that follow the request's cached ones.

    Raises RequestError for rows of another size or position.
    """
    into = program.new_rows(tokens)
    if sum(each.nbytes for each in into) != len(rows):
        raise RequestError(f"{len(rows)} bytes are not the keys and values of {tokens} tokens")
    # The token before `first` is cached, and `first` is not.
    if program.rows(request, first, first + 1) is not None or (
        first and program.rows(request, first - 1, first) is None
    ):
        raise RequestError("the keys and values do not follow the cached ones")
    _fill(into, rows)
    program.put_rows(request, first, into)


def _fill(arrays: Sequence[NDArray[Any]], rows: Buffer) -> None:
    tokens = arrays[0].shape[1]
    by_token = np.frombuffer(rows, np.uint8).reshape(tokens, -1)
    start = 0
    for each in arrays:
        heads, _, elements = each.shape
        stop = start + heads * elements * each.itemsize
        # tobytes copies, for the alignment of other types.
        part = by_token[:, start:stop].tobytes()
        each[...] = np.frombuffer(part, each.dtype).reshape(tokens, heads, elements).swapaxes(0, 1)
        start = stop
