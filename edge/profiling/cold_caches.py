"""Cold processor caches for measurements: filled with other data, as a whole model would leave
them."""

from __future__ import annotations

import numpy as np

from edge.profiling.loaded_sample import LoadedSample
from edge.protocol.step import Step

_CACHE_BYTES = 64 << 20
"""Bytes read between two steps to evict the sample. A model's weights exceed the caches and are
read between two layers' keys and values; a sample may be smaller than the caches."""

_LEAST_BYTES = 40 << 20
"""The capacity of most processors' caches; a sample that reads less stays in them."""

_COLD_ROWS = 4
"""Steps of more rows than this are bound by compute, not memory."""


class Caches:
    """Data that is read to evict weights from the processor's caches."""

    def __init__(self, budget_bytes: int) -> None:
        """Takes at most half of the budget."""
        nbytes = min(_CACHE_BYTES, budget_bytes // 2, max(budget_bytes // 4, _LEAST_BYTES))
        self._other = np.ones(nbytes // 8 + 1, np.uint64)

    @property
    def nbytes(self) -> int:
        return self._other.nbytes

    def forget(self) -> None:
        np.bitwise_or.reduce(self._other)

    def matter(self, step: Step) -> bool:
        """Whether cold caches change the time of this step."""
        return step.batch * step.num_tokens <= _COLD_ROWS

    def cold_seconds(self, loaded: LoadedSample, step: Step) -> float:
        """Seconds of one run of the step, with cold caches if they matter."""
        if self.matter(step):
            self.forget()
        return loaded.seconds(step)
