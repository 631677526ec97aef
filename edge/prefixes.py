"""Beginnings of prompts whose keys and values a shard has on disk, and finds again.

In blocks of one chunk each, so that what follows is computed in the very steps in which it would be
without them: the same bits. A block's key is the hash of all tokens up to its end and of all that
its keys and values depend on beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from edge import __version__
from edge.backends.base import StageProgram
from edge.wire import Assignment
from offload import PrefixStore


class Prefixes:
    """One session's view of its peer's store. Used by the compute thread."""

    def __init__(self, store: PrefixStore, assignment: Assignment) -> None:
        self._store = store
        self._block_tokens = assignment.limits.chunk_tokens
        self._most_tokens = assignment.limits.cached_tokens
        self._shard = _shard_digest(assignment)
        self._prompts: dict[str, tuple[int, ...]] = {}

    def recall(self, program: StageProgram, request: str, prompt: Sequence[int]) -> int:
        """Put what is known of the prompt into the request's cache: so many of its tokens.

        Never all of them, as the last one's logits are wanted. The prompt is remembered for `keep`.
        """
        self._prompts[request] = tuple(prompt)
        found = 0
        for key in self._keys(program, prompt):
            end = found + self._block_tokens
            if end >= len(prompt) or end > self._most_tokens:
                break
            rows = program.new_rows(self._block_tokens)
            if not self._store.get(key, rows):
                break
            program.put_rows(request, found, rows)
            found = end
        return found

    def keep(self, program: StageProgram, request: str) -> None:
        """The request is over: keep what its prompt has computed and is in memory."""
        prompt = self._prompts.pop(request, ())
        first = 0
        for key in self._keys(program, prompt):
            if not self._store.has(key):
                rows = program.rows(request, first, first + self._block_tokens)
                if rows is None or not self._store.put(key, rows):
                    return
            first += self._block_tokens

    def _keys(self, program: StageProgram, prompt: Sequence[int]) -> Iterator[str]:
        """Of each whole block, in order."""
        size = self._block_tokens
        digest = hashlib.sha256(f"{self._shard} {program.cache_digest} {size}".encode())
        for first in range(0, len(prompt) - size + 1, size):
            digest.update(np.asarray(prompt[first : first + size], "<i8").tobytes())
            yield digest.copy().hexdigest()


def _shard_digest(assignment: Assignment) -> str:
    """Of all that decides what a token's keys and values are, but for the program's own ways.

    Sums depend on how a stage is split, and everything on what comes before it: the whole plan
    counts, but not which devices run it.
    """
    anywhere = replace(
        assignment.plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    replace(shard, device=f"{rank}") for rank, shard in enumerate(stage.shards)
                ),
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
        (assignment.weight_format.name, assignment.weight_format.block_size),
        (assignment.weight_format.accuracy, assignment.kv_dtype),
        assignment.wire_rules.to_json(),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
