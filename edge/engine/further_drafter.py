"""Drafts by a model's further head, which reads the hidden states of an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import Backend, ShardWeights, StageProgram
from edge.memory.step_memory import further_limits
from edge.protocol.assignment import Assignment
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.transport import SoloCollective
from edge.weights.further import part_of

_log = logging.getLogger(__name__)

_NEWEST = 0.3
"""Weight of the newest time of a guess."""

_MOST_WAITING = 32
"""Rows that wait for the next draft, to be computed with it."""


class Follower(Protocol):
    """What is told the hidden states of answers that it drafts for."""

    def follow(
        self, request: str, position: int, tokens: Sequence[int], states: NDArray[np.float32]
    ) -> None:
        """The states [tokens, hidden] after the last norm of tokens from `position` on."""
        ...


class FurtherHeadDrafter:
    """A Drafter with the states of one answer at a time: answers beside others have no drafts.

    Its rows are counted from the first one that it was told. So rows that are missing, because they
    came from a cache or before a loss, make its guesses worse, and change nothing else.
    """

    looks_back = False

    def __init__(self, program: StageProgram, limits: StepLimits) -> None:
        """limits: the program's."""
        self._program = program
        self._limits = limits
        self._request = ""
        self._cached = 0
        """Rows in the head's KV cache, without those of guesses."""
        self._states: list[NDArray[np.float32]] = []
        """Rows that are not computed yet."""
        self._next: list[int] = []
        """The token behind each of them, which may not be known of the last."""
        self._end = 0
        """The answer's position behind the last row."""
        self._guess_s = 0.0

    @property
    def guess_s(self) -> float:
        return self._guess_s

    def foresee(self, request: str, tokens: Sequence[int]) -> None:
        """Ignored: `follow` tells it, with the states."""

    @property
    def weight_bytes(self) -> int:
        return self._program.weight_bytes

    def follow(
        self, request: str, position: int, tokens: Sequence[int], states: NDArray[np.float32]
    ) -> None:
        """See Follower."""
        if request != self._request:
            self.forget(self._request)
            self._request = request
        elif position < self._end:  # rows that are computed again
            known = self._end - position
            position, tokens, states = self._end, tokens[known:], states[known:]
            if not tokens:
                return
        if position == self._end and self._states:
            self._next.append(tokens[0])
        else:
            del self._states[len(self._next) :]
        self._states.extend(states.copy())
        self._next.extend(tokens[1:])
        self._end = position + len(tokens)
        if len(self._states) > _MOST_WAITING:
            self._compute(len(self._next), logit_rows=0)

    def propose(self, request: str, tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
        if request != self._request or end != self._end + 1 or not self._states or most < 1:
            return ()
        start_s = time.perf_counter()
        self._next.append(tokens[end - 1])
        found = self._compute(len(self._next), logit_rows=1)
        guesses: list[int] = []
        own = self._cached
        while found is not None:
            token, state = found
            guesses.append(token)
            if len(guesses) == most:
                break
            found = self._step(own, [token], state[None, None], logit_rows=1)
            own += 1
        if guesses:
            took_s = (time.perf_counter() - start_s) / len(guesses)
            self._guess_s += _NEWEST * (took_s - self._guess_s)
        return guesses

    def accepted(self, request: str, drafted: int, accepted: int) -> None:
        """Ignored: `follow` tells it."""

    def forget(self, request: str) -> None:
        if request == self._request:
            self._program.release(request)
            self._request, self._cached, self._end = "", 0, 0
            self._states, self._next = [], []

    def close(self) -> None:
        self._program.close()

    def _compute(self, count: int, *, logit_rows: int) -> tuple[int, NDArray[np.float32]] | None:
        """Compute the first rows that wait. Returns as `_step` does for the last of them."""
        found = None
        while count and self._request:
            size = min(count, self._limits.chunk_tokens)
            states, tokens = np.stack(self._states[:size]), self._next[:size]
            del self._states[:size], self._next[:size]
            count -= size
            found = self._step(
                self._cached, tokens, states[None], logit_rows=0 if count else logit_rows
            )
            if self._request:
                self._cached += size
        return found

    def _step(
        self, position: int, tokens: Sequence[int], states: NDArray[np.float32], *, logit_rows: int
    ) -> tuple[int, NDArray[np.float32]] | None:
        """The guess behind the last of these rows, and its hidden state; None without a guess."""
        if position + len(tokens) > self._limits.context_tokens:
            return None
        entry = StepEntry(
            request=self._request, position=position, tokens=tuple(tokens), logit_rows=logit_rows
        )
        try:
            found = self._program.logits(Step(entries=(entry,)), states, SoloCollective())
        except Exception:  # back ends raise errors of their libraries; a guess is not worth one
            _log.warning(
                "a further head failed, and guesses nothing for this answer", exc_info=True
            )
            self.forget(self._request)
            return None
        if not logit_rows:
            return None
        return int(found.array()[0, -1].argmax()), found.states()[0, -1].copy()


def load_further(
    assignment: Assignment, backend: Backend, weights: ShardWeights
) -> FurtherHeadDrafter | None:
    """The drafter of the sampler of a model with a further head."""
    further, manifest = assignment.further, part_of(weights.manifest)
    if further is None or manifest is None or not assignment.layout.vocab:
        return None
    limits = further_limits(assignment.limits)
    program = backend.load(
        further.spec,
        further.layout,
        replace(weights, manifest=manifest, load_room_bytes=None, lends_buffers=False),
        further.weight_format,
        limits=limits,
    )
    return FurtherHeadDrafter(program, limits)
