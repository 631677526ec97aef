"""Values that pass between the graphs of a layer with streamed experts."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.memory.step_memory import most_results
from edge.models.experts import Experts


class ExpertRows:
    """Buffers that all layers share, for steps of up to `most` rows in up to two halves. Those of a
    large step are freed before a smaller one."""

    def __init__(self, parts: Iterable[Experts], *, most: int, hidden_size: int) -> None:
        found = tuple(parts)
        self._hidden_size = hidden_size
        uses = max((most * part.top_k for part in found), default=0)
        experts = max((len(part.held) for part in found), default=0)
        results = max((most_results(part, most) + len(part.held) + 1 for part in found), default=0)
        self._integers = {
            "sources": np.zeros(uses + _HALVES, np.int64),
            "ranks": np.zeros(uses, np.int64),
        }
        self._of_each = {
            name: np.zeros((_HALVES, experts), np.int64) for name in ("starts", "stops", "used")
        }
        self._weights = np.zeros(uses, np.float32)
        self._gate = np.zeros(most if found else 0, np.float32)
        # Pages of its own, which can be given back: those that processes share would stay.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, max(1, results * hidden_size * 4), flags=flags)
        self._results = np.frombuffer(self._pages, np.float32, results * hidden_size)
        self._rows = 0

    def before_step(self, rows: int) -> None:
        """Give the results' pages back where a step of `rows` rows is smaller than the last one."""
        if rows < self._rows:
            self._pages.madvise(mmap.MADV_DONTNEED)
        self._rows = rows

    def arrays(
        self, part: Experts, *, half: int, first: int, batch: int, tokens: int
    ) -> dict[str, NDArray[Any]]:
        """By input or output of a layer's graphs; the step's rows from `first` on are this half's.

        Of the results there is room for the most that there may be.
        """
        k, count, rows = part.top_k, len(part.held), batch * tokens
        uses, results = rows * k, most_results(part, rows)
        begin = (first * k + half * (count + 1)) * self._hidden_size  # behind the other half's
        return {
            "expert_sources": self._integers["sources"][first * k + half :][: uses + 1],
            "expert_ranks": self._integers["ranks"][first * k :][:uses],
            "expert_weights": self._weights[first * k :][:uses].reshape(rows, k),
            "expert_gate": self._gate[first:][:rows].reshape(batch, tokens, 1),
            **{f"expert_{name}": each[half, :count] for name, each in self._of_each.items()},
            "expert_results": self._results[begin:][: results * self._hidden_size].reshape(
                results, self._hidden_size
            ),
        }


_HALVES = 2
"""Parts of a chunk, each with arrays of its own."""
