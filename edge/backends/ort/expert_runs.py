"""Streamed experts, computed after the graph that chooses them for each row."""

from __future__ import annotations

import contextlib
from typing import Any

from numpy.typing import NDArray

from edge.backends.ort.expert_rows import ExpertRows
from edge.backends.ort.open_graphs import OpenGraphs
from edge.backends.ort.runtime import ort
from edge.backends.ort.segments import GraphSegment
from edge.backends.ort.step_buffers import StepBuffers, StepShape, rows_of
from edge.memory.step_memory import most_rows
from edge.models.experts import Experts
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout


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
        self._rows = ExpertRows(parts, most=most_rows(limits), hidden_size=spec.hidden_size)

    def before_step(self, rows: int) -> None:
        self._rows.before_step(rows)

    def arrays(self, segment: GraphSegment, shape: StepShape) -> dict[str, NDArray[Any]]:
        """What goes between the graphs of the segment's layer; nothing where it has no experts."""
        part = self._behind(segment)
        return {} if part is None else self._arrays(part, shape)

    def run(self, index: int, shape: StepShape, graphs: OpenGraphs) -> None:
        """Those behind the segment that have rows. Their results follow each other, expert after
        expert."""
        streamed, segment = graphs.streamed, graphs.segments[index]
        part = self._behind(segment)
        assert streamed is not None
        assert part is not None
        arrays = self._arrays(part, shape)
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
        done = int(part.is_part)  # the first row is of all others
        results[:done] = 0
        runs = streamed.experts(index, arrays["expert_used"], tokens=len(given))
        with contextlib.closing(runs):
            for run in runs:
                for number, place in run:
                    rows = sources[starts[number] : stops[number]]
                    made = results[done : done + len(rows)]
                    place.run(given[rows], streamed.biases(index, number), made, self._options)
                    done += len(rows)

    def _behind(self, segment: GraphSegment) -> Experts | None:
        """Those of the segment's layer, where layers may be on disk."""
        streamed = segment.streamed
        part = None if streamed is None else self._layout.layer(streamed.layer).feed_forward
        return part if isinstance(part, Experts) else None

    def _arrays(self, part: Experts, shape: StepShape) -> dict[str, NDArray[Any]]:
        return self._rows.arrays(
            part,
            half=shape.half,
            first=shape.first_token,
            batch=shape.batch,
            tokens=shape.tokens,
        )
