"""Keys of stored prefixes: what keys, values and states depend on.

A key is an HMAC, by the owner's secret, of all tokens up to the end of a block and of everything
else that its content depends on. Without the secret nobody learns that a block exists. The plan is
no part of it, unless no bit may depend on what is found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge.errors import RequestError
from edge.models.attention import Attention
from edge.protocol.assignment import Assignment
from edge.version import __version__

STATES = 0
"""In place of the tokens of a block: a snapshot."""


class TokenChain:
    """The tokens of one request, as digests of its beginnings."""

    def __init__(self, macs: Sequence[hmac.HMAC], every: int) -> None:
        """macs: of everything but the tokens, for the own device and those that it trusts. every:
        beginnings have a multiple of so many tokens."""
        self._macs = macs
        self._every = every
        self._tokens = hashlib.sha256()
        self._rest: tuple[int, ...] = ()
        """Tokens after the last digest."""
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._digests) * self._every + len(self._rest)

    def add(self, position: int, tokens: Sequence[int]) -> None:
        """Add tokens from `position` on. Ignored if they leave a gap or are known already."""
        first, size = len(self) - len(self._rest), self._every
        if not first <= position <= len(self):
            return
        known = (*self._rest[: position - first], *tokens)
        whole = len(known) // size * size
        packed = np.asarray(known[:whole], "<i8").tobytes()
        for begin in range(0, len(packed), 8 * size):
            self._tokens.update(packed[begin : begin + 8 * size])
            self._digests.append(self._tokens.digest())
        self._rest = known[whole:]

    def keys(self, kind: int, end: int) -> Iterator[str]:
        """Keys of a block of so many tokens, or of a snapshot, that ends at token `end`; the own
        one first. Raises RequestError if no beginning ends there."""
        number, rest = divmod(end, self._every)
        if rest or not 0 < number <= len(self._digests):
            raise RequestError(f"no beginning of {end} tokens is known")
        for mac in self._macs:
            own = mac.copy()
            own.update(b"%d" % kind + self._digests[number - 1])
            yield own.hexdigest()

    def own_key(self, kind: int, end: int) -> str:
        return next(self.keys(kind, end))


def prefix_facts(assignment: Assignment) -> str:
    """A digest of everything that keys, values and states depend on, except tokens and the
    program's own digest.

    Their last bits depend on the plan, because sums depend on the split of a stage: the plan
    counts, without its devices, if no bit may depend on what is found.
    """
    model, limits, rules = assignment.model, assignment.limits, assignment.wire_rules
    mixers = [each.mixer for each in model.kinds]
    rotations = [each.rotary for each in mixers if isinstance(each, Attention)]
    facts: list[Any] = [
        __version__,
        assignment.weights_digest,
        model.to_json(),
        [each.is_long(limits.context_tokens) for each in rotations],
        assignment.weight_format.to_json(),
        assignment.kv_dtype,
        sorted({each.format for each in (*rules.sums, *rules.hops)} - {"float32"}),
    ]
    if limits.batch_invariant:
        stages = (
            replace(
                stage,
                shards=tuple(shard.on(f"{rank}") for rank, shard in enumerate(stage.shards)),
            )
            for stage in assignment.plan.stages
        )
        facts += [
            replace(assignment.plan, stages=tuple(stages)).to_json(),
            assignment.manifest_digest,
            limits.exceeds_memory,
            (assignment.stage, assignment.rank),
            dataclasses.asdict(rules),
        ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
