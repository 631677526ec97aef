"""Where a shard's time goes: computing, summing with its stage, waiting for others, sampling."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from transport import Collective


@dataclass(slots=True)
class StepTimes:
    """Seconds since the counters were last taken, over `steps` steps.

    compute_s: graphs and everything else of the shard itself. reduce_s: sums over the stage, the
    wait for its slowest shard included. receive_s: waiting for the stage before, and for the next
    token. send_s: handing on. sample_s: gathering logits and choosing tokens.
    """

    steps: int = 0
    compute_s: float = 0.0
    reduce_s: float = 0.0
    receive_s: float = 0.0
    send_s: float = 0.0
    sample_s: float = 0.0

    def take(self) -> dict[str, float]:
        """The counters by name; they start again from zero."""
        taken = dataclasses.asdict(self)
        for name in taken:
            setattr(self, name, type(taken[name])())
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes:
    """What one peer measured while it ran its shard; times as in StepTimes."""

    name: str
    stage: int
    rank: int
    steps: int
    compute_s: float
    reduce_s: float
    receive_s: float
    send_s: float
    sample_s: float
    resident_bytes: int
    """Memory of the whole daemon now."""
    peak_bytes: int
    """The most it ever was."""

    @classmethod
    def from_header(
        cls, header: Mapping[str, Any], *, name: str, stage: int, rank: int
    ) -> PeerTimes:
        """Raises ValueError or TypeError for a header that no peer of this version sends."""
        values: dict[str, Any] = {}
        for each in dataclasses.fields(cls)[3:]:
            kind = int if each.type == "int" else float
            values[each.name] = kind(header[each.name])
        return cls(name=name, stage=stage, rank=rank, **values)


class TimedCollective:
    """A Collective that adds the time of its sums to `times.reduce_s`. See `Collective`."""

    def __init__(self, inner: Collective, times: StepTimes) -> None:
        self._inner = inner
        self._times = times
        self.rank = inner.rank
        self.size = inner.size

    def all_reduce(self, array: NDArray[Any]) -> None:
        start = time.perf_counter()
        self._inner.all_reduce(array)
        self._times.reduce_s += time.perf_counter() - start

    def all_gather(self, own: NDArray[Any], into: Sequence[NDArray[Any]]) -> None:
        self._inner.all_gather(own, into)

    def gather(self, own: NDArray[Any], into: Sequence[NDArray[Any]] | None, *, root: int) -> None:
        self._inner.gather(own, into, root=root)

    def broadcast(self, array: NDArray[Any], *, root: int) -> None:
        self._inner.broadcast(array, root=root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()
