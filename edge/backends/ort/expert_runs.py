"""Computes streamed experts after the graph that chooses them for each row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.backends.onnx.segments import GraphSegment
from edge.backends.onnx.step_buffers import StepBuffers, StepShape, rows_of
from edge.backends.ort.open_graphs import OpenGraphs
from edge.memory.step_memory import most_results, most_rows
from edge.models.experts import Experts
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.system.pages import advise, private_memory
from edge.weights.layout import ShardLayout

_HALVES = 2
"""Parts of a chunk, each with arrays of its own."""


class _ExpertRows:
    """Buffers that all layers share, for steps of up to `most` rows in up to two halves. Those of a
    large step are freed before a smaller step."""

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
        self._pages = private_memory(max(1, results * hidden_size * 4))
        self._results = np.frombuffer(self._pages, np.float32, results * hidden_size)
        self._rows = 0

    def before_step(self, rows: int) -> None:
        """Free the pages of results if a step of `rows` rows is smaller than the last one."""
        if rows < self._rows:
            advise(self._pages, "drop")
        self._rows = rows

    def arrays(self, part: Experts, shape: StepShape) -> dict[str, NDArray[Any]]:
        """Arrays by the name of an input or output of a layer's graphs."""
        half, first = shape.half, shape.first_token
        k, count, rows = part.top_k, len(part.held), shape.batch * shape.tokens
        uses, results = rows * k, most_results(part, rows)
        begin = (first * k + half * (count + 1)) * self._hidden_size  # after the other half's
        return {
            "expert_sources": self._integers["sources"][first * k + half :][: uses + 1],
            "expert_ranks": self._integers["ranks"][first * k :][:uses],
            "expert_weights": self._weights[first * k :][:uses].reshape(rows, k),
            "expert_gate": self._gate[first:][:rows].reshape(shape.batch, shape.tokens, 1),
            **{f"expert_{name}": each[half, :count] for name, each in self._of_each.items()},
            "expert_results": self._results[begin:][: results * self._hidden_size].reshape(
                results, self._hidden_size
            ),
        }


class ExpertRuns:
    """Expert runs of a shard whose layers may be on disk."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        limits: StepLimits,
        buffers: StepBuffers,
        options: ort.RunOptions,
    ) -> None:
        blocks = [layout.layer(number).feed_forward for number in layout.layers]
        parts = [each for each in blocks if isinstance(each, Experts)]
        self.has_experts = bool(parts)
        self._hidden_size = spec.hidden_size
        self._layout = layout
        self._buffers = buffers
        self._options = options
        self._rows = _ExpertRows(parts, most=most_rows(limits), hidden_size=spec.hidden_size)

    def before_step(self, rows: int) -> None:
        self._rows.before_step(rows)

    def arrays(self, segment: GraphSegment, shape: StepShape) -> dict[str, NDArray[Any]]:
        """Values that pass between the graphs of the segment's layer; none without experts."""
        part = self._experts_of(segment)
        return {} if part is None else self._rows.arrays(part, shape)

    def run(self, index: int, shape: StepShape, graphs: OpenGraphs) -> None:
        """Compute the chosen experts after the segment; results follow each other by expert."""
        streamed, segment = graphs.streamed, graphs.segments[index]
        part = self._experts_of(segment)
        assert streamed is not None
        assert part is not None
        arrays = self._rows.arrays(part, shape)
        sources, results = arrays["expert_sources"], arrays["expert_results"]
        starts, stops = arrays["expert_starts"], arrays["expert_stops"]
        size = self._hidden_size
        width = segment.partial_parts * size
        put_out = rows_of(
            self._buffers.partial[(index + 1) % 2],
            width,
            shape.batch,
            shape.tokens,
            shape.first_token,
        )
        given = put_out.reshape(-1, width)[:, :size]
        done = int(part.is_part)  # row 0 stands for experts of other shards
        results[:done] = 0
        runs = streamed.experts(index, arrays["expert_used"], tokens=len(given))
        with contextlib.closing(runs):
            for run in runs:
                for number, place in run:
                    rows = sources[starts[number] : stops[number]]
                    made = results[done : done + len(rows)]
                    place.run(given[rows], streamed.biases(index, number), made, self._options)
                    done += len(rows)

    def _experts_of(self, segment: GraphSegment) -> Experts | None:
        """The experts of the segment's layer, if layers may be on disk."""
        streamed = segment.streamed
        part = None if streamed is None else self._layout.layer(streamed.layer).feed_forward
        return part if isinstance(part, Experts) else None
