"""Where a shard's time goes, as a peer tells it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class StepTimes:
    """Seconds spent over `steps` steps.

    compute_s: graphs and everything else of the shard itself. load_s: waiting for the disk, where
    weights are streamed. reduce_s: sums over the stage, the
    wait for its slowest shard included. receive_s: waiting for the stage before, and for the next
    token. send_s: handing on. sample_s: choosing tokens with the other shards of the last stage.
    """

    steps: int = 0
    compute_s: float = 0.0
    load_s: float = 0.0
    reduce_s: float = 0.0
    receive_s: float = 0.0
    send_s: float = 0.0
    sample_s: float = 0.0

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> StepTimes:
        """Raises ValueError, TypeError or KeyError for what no peer of this version sends."""
        values: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            value = header[each.name]
            if type(value) not in ((int,) if each.type == "int" else (int, float)):
                raise TypeError(f"{each.name} is not a number")
            if not 0 <= value < math.inf:
                raise ValueError(f"{each.name} is {value}")
            values[each.name] = value
        return cls(**values)

    @property
    def each(self) -> StepTimes:
        """Of one step, on average; all zeros when there was none."""
        steps = max(1, self.steps)
        return StepTimes(
            steps=min(1, self.steps),
            compute_s=self.compute_s / steps,
            load_s=self.load_s / steps,
            reduce_s=self.reduce_s / steps,
            receive_s=self.receive_s / steps,
            send_s=self.send_s / steps,
            sample_s=self.sample_s / steps,
        )

    def take(self) -> dict[str, float]:
        """The counters by name; they start again from zero."""
        taken = dataclasses.asdict(self)
        for name in taken:
            setattr(self, name, type(taken[name])())
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes:
    """What one peer measured while it ran its shard."""

    name: str
    stage: int
    rank: int
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

    @classmethod
    def from_header(
        cls, header: Mapping[str, Any], *, name: str, stage: int, rank: int
    ) -> PeerTimes:
        """Raises ValueError, TypeError or KeyError for what no peer of this version sends."""
        return cls(
            name=name,
            stage=stage,
            rank=rank,
            prompt=StepTimes.from_header(header["prompt"]),
            decode=StepTimes.from_header(header["decode"]),
            resident_bytes=int(header["resident_bytes"]),
            peak_bytes=int(header["peak_bytes"]),
            kv_written_bytes=int(header["kv_written_bytes"]),
        )
