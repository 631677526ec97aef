"""Beginnings of prompts whose keys and values a shard has on disk, and finds again.

In blocks of one chunk each, so that what follows is computed in the very steps in which it would be
without them: the same bits. A block's key is the hash of all tokens up to its end and of all that
its keys and values depend on as well, made with the owner's secret: who has another one does not
even learn that a block is there.

They are written behind the compute thread's back, while their request is computed, as fast as the
disk takes them: what it does not take before the request is over is not kept. There is memory for
one block that is on its way, to or from the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import KvStorage
from edge.offload import PrefixStore
from edge.protocol.assignment import Assignment
from edge.protocol.step import SHORTEST_STEP
from edge.version import __version__


@dataclass(slots=True)
class _Unkept:
    """The blocks of a request's prompt that are not on disk yet, by their keys in order."""

    keys: deque[str]
    first: int
    """The first one's first token."""


class PrefixCache:
    """One session's view of its peer's store. Used by the compute thread; `close` it."""

    def __init__(
        self, store: PrefixStore, assignment: Assignment, secret: bytes, owner: str = ""
    ) -> None:
        """secret: of whom the beginnings belong to; owner: the id of the device whose they are."""
        self._store = store
        self._secret = secret
        self._owner = owner
        self._block_tokens = assignment.limits.chunk_tokens
        self._most_tokens = assignment.limits.cached_tokens
        self._shard = _shard_digest(assignment)
        self._unkept: dict[str, _Unkept] = {}
        self._block: list[NDArray[Any]] | None = None
        """Made once, as it is counted once: whatever is on its way lies here."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edge-kv-keep")
        self._writing: tuple[str, Future[bool]] | None = None
        """Whose block lies there, and whether it could be kept."""

    def match(
        self, program: KvStorage, request: str, prompt: Sequence[int], *, known: int = 0
    ) -> int:
        """Put what is known of the prompt into the request's cache: so many of its tokens.

        known: tokens that are there. Two or more are always left to compute: one alone would be
        computed in another way than in a chunk. The others' are kept by `keep`.
        """
        keys = deque(self._keys(program, prompt))
        self._await_writer()
        if known:
            on_disk = sum(1 for _key in takewhile(self._store.has, keys)) * self._block_tokens
            if on_disk <= known:
                self._unkept[request] = _Unkept(keys, 0)
                return known
        found = 0
        while keys:
            end = found + self._block_tokens
            if end > min(len(prompt) - SHORTEST_STEP, self._most_tokens):
                break
            rows = self._rows(program)
            if not self._store.get(keys[0], rows, self._secret):
                break
            program.put_rows(request, found, rows)
            keys.popleft()
            found = end
        self._unkept[request] = _Unkept(keys, found)
        return max(found, known)

    def keep(self, program: KvStorage) -> None:
        """Begin to write a block that has been computed, unless one is being written.

        Called between any two steps; the rows are copied, no disk is waited for.
        """
        if not self._unkept or not self._is_idle():
            return
        for request, unkept in self._unkept.items():
            while unkept.keys and self._store.has(unkept.keys[0]):
                self._next(unkept)
            if not unkept.keys:
                continue
            rows = program.rows(request, unkept.first, unkept.first + self._block_tokens)
            if rows is not None:
                block = self._rows(program)
                for into, some in zip(block, rows, strict=True):
                    into[...] = some
                kept = self._writer.submit(
                    self._store.put, unkept.keys[0], block, self._secret, self._owner
                )
                self._writing = (request, kept)
                self._next(unkept)
                return

    def forget(self, program: KvStorage, request: str) -> None:
        """The request is over: of its prompt one more block is kept, if the disk is ready."""
        self.keep(program)
        self._unkept.pop(request, None)

    def close(self) -> None:
        """Wait for the block that is being written."""
        self._writer.shutdown()

    def _is_idle(self) -> bool:
        """Nothing is being written. Without one block those behind it would never be found."""
        if self._writing is not None:
            request, kept = self._writing
            if not kept.done():
                return False
            self._writing = None
            if not kept.result() and request in self._unkept:
                self._unkept[request].keys.clear()
        return True

    def _await_writer(self) -> None:
        if self._writing is not None:
            wait([self._writing[1]])

    def _rows(self, program: KvStorage) -> list[NDArray[Any]]:
        if self._block is None:
            self._block = program.new_rows(self._block_tokens)
        return self._block

    def _next(self, unkept: _Unkept) -> None:
        unkept.keys.popleft()
        unkept.first += self._block_tokens

    def _keys(self, program: KvStorage, prompt: Sequence[int]) -> Iterator[str]:
        """Digests of whole blocks, in order."""
        size = self._block_tokens
        facts = f"{self._shard} {program.cache_digest} {size}".encode()
        digest = hmac.new(self._secret, facts, hashlib.sha256)
        for first in range(0, len(prompt) - size + 1, size):
            digest.update(np.asarray(prompt[first : first + size], "<i8").tobytes())
            yield digest.copy().hexdigest()


def _shard_digest(assignment: Assignment) -> str:
    """A digest of all that decides a token's keys and values, but for the program's own ways.

    Sums depend on how a stage is split, and everything on what comes before it: the whole plan
    counts, but not which devices run it.
    """
    anywhere = replace(
        assignment.plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(shard.on(f"{rank}") for rank, shard in enumerate(stage.shards)),
            )
            for stage in assignment.plan.stages
        ),
    )
    facts = [
        __version__,
        assignment.weights_digest,
        assignment.manifest_digest,
        assignment.model.to_json(),
        anywhere.to_json(),
        assignment.limits.exceeds_memory,
        (assignment.stage, assignment.rank),
        assignment.weight_format.to_json(),
        assignment.kv_dtype,
        dataclasses.asdict(assignment.wire_rules),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
