"""Caches of the processor as a model would leave them for a measurement: full of others."""

from __future__ import annotations

import numpy as np

from edge.profiling.loaded_sample import LoadedSample
from edge.protocol.step import Step

_CACHE_BYTES = 64 << 20
"""Read between two steps, so that none finds in the processor's caches what the one before left
there: the model's weights are read between two layers' keys and values, and are more than caches
hold, where the sample may not be."""

_LEAST_BYTES = 40 << 20
"""The most that caches of most processors hold; a sample that reads less stays in them."""

_COLD_ROWS = 4
"""Steps of more rows than these compute longer than they read."""


class Caches:
    """What is read to fill the processor's caches with something else than weights."""

    def __init__(self, budget_bytes: int) -> None:
        """It takes up to half of the budget, where that is small."""
        nbytes = min(_CACHE_BYTES, budget_bytes // 2, max(budget_bytes // 4, _LEAST_BYTES))
        self._other = np.ones(nbytes // 8 + 1, np.uint64)

    @property
    def nbytes(self) -> int:
        return self._other.nbytes

    def forget(self) -> None:
        np.bitwise_or.reduce(self._other)

    def matter(self, step: Step) -> bool:
        """Whether a step is short enough to notice them."""
        return step.batch * step.num_tokens <= _COLD_ROWS

    def cold_seconds(self, loaded: LoadedSample, step: Step) -> float:
        """Seconds of the step, once, its weights not in a cache if that matters."""
        if self.matter(step):
            self.forget()
        return loaded.seconds(step)
