"""Sums of what the products of a shard are given, as inputs and outputs of its graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.backends.ort.open_segment import OpenSegment
from edge.backends.ort.segments import gram_names
from edge.kernels.experts.onnx import count_uses
from edge.weights.layout import ShardLayout
from edge.weights.observation import ObservedExperts, ObservedRun, observed_runs


class ObservedInputs:
    """What is observed of a shard. Each graph adds to what was seen before."""

    def __init__(self, layout: ShardLayout, *, is_asked_for: bool) -> None:
        self.runs = observed_runs(layout) if is_asked_for else ()
        self._layout = layout

    def observe(self, segment: OpenSegment, x: str, name: str) -> None:
        """Add what the matrix is given to what it was given before, if that is asked for."""
        runs = [each for each in self.runs if isinstance(each, ObservedRun)]
        runs = [run for run in runs if run.matrix == name]
        if not runs:
            return
        graph, columns = segment.graph, len(self._layout.matrix(name).columns)
        rows = graph.node("Reshape", x, graph.constant(f"rows_{columns}", np.array([-1, columns])))
        for run in runs:
            inputs = rows
            if len(run.columns) < columns:
                places = (run.inputs.start, run.inputs.stop, 1)
                ends = [graph.constant(f"place_{each}", np.array([each])) for each in places]
                inputs = graph.node("Slice", rows, *ends)
            before, after = gram_names(run)
            gram = segment.input(before, np.float32, run.shape)
            total = graph.node("Gemm", inputs, inputs, gram, transA=1)
            segment.output(total, after, np.float32, run.shape)

    def count_experts(self, segment: OpenSegment, layer: int, chosen: Callable[[], str]) -> None:
        """Likewise how many rows go through each expert. chosen [rows, top_k]: which those are."""
        for run in self.runs:
            if isinstance(run, ObservedExperts) and run.layer == layer:
                before, after = gram_names(run)
                counts = segment.input(before, np.float32, run.shape)
                counted = count_uses(segment.graph, chosen(), num_experts=run.num_experts)
                total = segment.graph.node("Add", counts, counted)
                segment.output(total, after, np.float32, run.shape)
