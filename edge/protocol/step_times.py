"""Times of a shard's steps by part, as a peer reports them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

DRAFT_ROWS = (1, 2, 4, 8, 16)
"""Rows of steps with drafts whose time is predicted."""


@dataclass(slots=True)
class StepTimes:
    """Seconds of `steps` steps by part, and the weights that they read.

    compute_s: graphs and all other work of the shard itself. load_s: waiting for the disk, where
    weights are streamed. reduce_s: sums over the stage, with the wait for its slowest shard.
    receive_s: waiting for the stage before, and for the next token. send_s: sending to other
    shards. sample_s: choosing tokens with the other shards of the last stage.

    read_bytes: weights read from disk. experts: experts that tokens used, where experts are cached.
    experts_read: those of them that were not in the cache.
    """

    steps: int = 0
    compute_s: float = 0.0
    load_s: float = 0.0
    reduce_s: float = 0.0
    receive_s: float = 0.0
    send_s: float = 0.0
    sample_s: float = 0.0
    read_bytes: float = 0.0
    experts: float = 0.0
    experts_read: float = 0.0

    @property
    def each(self) -> StepTimes:
        """The times of one step, on average; all zeros when there was none."""
        times = dataclasses.astuple(self)[1:]
        return StepTimes(min(1, self.steps), *(each / max(1, self.steps) for each in times))

    @property
    def expert_hits(self) -> float | None:
        """Hit rate of the expert cache; None where no experts were used from it."""
        return 1 - self.experts_read / self.experts if self.experts else None

    def take(self) -> StepTimes:
        """Return the counters, and reset them to zero."""
        taken = dataclasses.replace(self)
        for each in dataclasses.fields(self):
            setattr(self, each.name, each.default)
        return taken


@dataclass(slots=True)
class TokenSteps:
    """Decode steps of one token of each request, since the shard was loaded.

    Without steps with guesses and without the first step, so that they compare with a prediction.
    rows: of all steps. tokens: cached tokens before each row, added up. compute_s: see `StepTimes`.
    """

    steps: Annotated[int, Meta(ge=0)] = 0
    rows: Annotated[int, Meta(ge=0)] = 0
    tokens: Annotated[int, Meta(ge=0)] = 0
    compute_s: Annotated[float, Meta(ge=0)] = 0.0

    def since(self, before: TokenSteps) -> TokenSteps:
        """The steps after `before`, an earlier state of these counters."""
        return TokenSteps(
            steps=self.steps - before.steps,
            rows=self.rows - before.rows,
            tokens=self.tokens - before.tokens,
            compute_s=self.compute_s - before.compute_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """Predicted compute seconds of a shard for one token of one request, and of whole steps.

    ValueError for values that are not above 0 and finite.
    """

    first_s: float
    """With nothing cached."""
    last_s: float
    """With `tokens` tokens cached."""
    tokens: int
    draft_steps_s: Annotated[tuple[float, ...], Meta(max_length=len(DRAFT_ROWS))] = ()
    """Seconds of whole steps of `DRAFT_ROWS` rows of one request, through all devices and links."""

    def __post_init__(self) -> None:
        times = (self.first_s, self.last_s, *self.draft_steps_s)
        if not (all(0 < each < math.inf for each in times) and self.tokens > 0):
            raise ValueError("expected times and tokens must be finite and above 0")

    def at(self, position: int) -> float:
        """With `position` tokens cached, by linear interpolation."""
        return self.first_s + (self.last_s - self.first_s) * min(1.0, position / self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """Measurements of a peer for one shard."""

    prompt: StepTimes
    """Steps with more than one token of a request."""
    decode: StepTimes
    """Steps with one token of each request."""
    resident_bytes: int
    """Memory of the daemon process now."""
    peak_bytes: int
    """Largest memory of the daemon process so far."""
    kv_written_bytes: int = 0
    """Keys and values that were written to disk since the model was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes(ShardTimes):
    """Measurements of a peer for its shard of a model."""

    name: str
    stage: int
    rank: int
