"""Times of a shard's steps, part by part, as a peer tells them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Seconds spent over `steps` steps, and what these read.

    compute_s: graphs and everything else of the shard itself. load_s: waiting for the disk, where
    weights are streamed. reduce_s: sums over the stage, the wait for its slowest shard included.
    receive_s: waiting for the stage before, and for the next token. send_s: handing on. sample_s:
    choosing tokens with the other shards of the last stage.

    read_bytes: of weights, from disk. experts: that tokens went through, where experts are brought
    in; experts_read: those of them that were not in memory.
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
        """The part of the experts that was in memory; None where none were brought in."""
        return 1 - self.experts_read / self.experts if self.experts else None

    def take(self) -> StepTimes:
        """The counters; they start again from zero."""
        taken = dataclasses.replace(self)
        for each in dataclasses.fields(self):
            setattr(self, each.name, each.default)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """What a shard is predicted to compute for one token of one request, in seconds.

    ValueError for what is no time.
    """

    first_s: float
    """With nothing cached, and: """
    last_s: float
    """with as many tokens cached as: """
    tokens: int

    def __post_init__(self) -> None:
        if not (0 < self.first_s < math.inf and 0 < self.last_s < math.inf and self.tokens > 0):
            raise ValueError("a step is expected to take a time that is none")

    def at(self, position: int) -> float:
        """With `position` tokens cached, of which each takes the same."""
        return self.first_s + (self.last_s - self.first_s) * min(1.0, position / self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """What a peer measured while it ran one shard."""

    prompt: StepTimes
    """Steps of more than one token of a request."""
    decode: StepTimes
    """Steps of one token of each request in them."""
    resident_bytes: int
    """Memory of the whole daemon now."""
    peak_bytes: int
    """The most it ever was."""
    kv_written_bytes: int = 0
    """Keys and values that went to disk since the model was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes(ShardTimes):
    """What a peer measured while it ran its shard of a model."""

    name: str
    stage: int
    rank: int
