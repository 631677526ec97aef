"""The steps of a shard's graphs, on every provider.

What a step reads and writes lies in host buffers made once. A provider says where keys and values
are, and computes one graph (`_compute`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.interface import HostLogits, check_step
from edge.backends.kv_swap import CacheMoves
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.segments import GraphSegment
from edge.backends.onnx.side_inputs import SideInputs
from edge.backends.onnx.step_buffers import StepBuffers, StepShape, rows_of
from edge.backends.overlap import parts_of
from edge.models.spec import ModelSpec
from edge.protocol.step import Step, StepLimits
from edge.transport import BackgroundWork, Collective
from edge.weights.layout import ShardLayout

_OF_THE_HEAD = ("states", "logits")
"""Outputs of a graph that is only the head."""


class Graphs(Protocol):
    """The graphs of a shard in execution order, and the files that they read."""

    @property
    def segments(self) -> tuple[GraphSegment, ...]: ...

    @property
    def embedding(self) -> EmbeddingRows | None:
        """The embedding's rows on disk, which the first stage reads."""
        ...

    def check(self) -> None:
        """Raises CheckpointError if the file of weights has changed."""
        ...

    def begin(self, index: int) -> None:
        """Wait until the segment's weights are in memory."""
        ...

    def end(self, index: int) -> None:
        """Release the segment's weights after it was computed."""
        ...


_G = TypeVar("_G", bound=Graphs)


class GraphSteps(ABC, Generic[_G]):
    """Computes steps by a shard's graphs, with sums over shards between them."""

    _graphs: _G
    _moves: CacheMoves
    device_sums = None
    mixes = False
    """See `StageCompute`."""

    def __init__(self, spec: ModelSpec, layout: ShardLayout, limits: StepLimits) -> None:
        self._spec = spec
        self._layout = layout
        self._limits = limits
        self._buffers = StepBuffers(spec, layout, limits)
        self._side_inputs = SideInputs(spec, layout, limits)
        self._run_options = ort.RunOptions()
        # The value that stands for "none". ONNX Runtime's Python code reads the entry in each run,
        # and a missing entry costs a C++ exception, 60 us a run.
        self._run_options.add_run_config_entry("gpu_graph_id", "0")

    @abstractmethod
    def _place(self, step: Step) -> tuple[int, bool]:
        """Make room for the keys and values of the step's requests. Returns the first slot, and
        whether a dummy request fills the step up."""

    @abstractmethod
    def _forget_bindings(self) -> None:
        """Called after a buffer has moved."""

    @abstractmethod
    def _begin_step(self, rows: int) -> None:
        """Called before a step of so many rows."""

    @abstractmethod
    def _compute(self, index: int, shape: StepShape) -> None:
        """Run one graph."""

    @abstractmethod
    def _cache_of(self, layer: int) -> int | None:
        """The index of the cache that a layer uses, if it keeps all tokens."""

    @abstractmethod
    def _wrote(self, step: Step, slot: int) -> None:
        """Record the tokens that the step's requests have now."""

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        if self._spec.joins_states:  # beside the embedding's rows
            flat = self._buffers.partial[0]
            return rows_of(flat, self._spec.hidden_size, *step.shape)
        handed = self._side_inputs.handed(*step.shape)
        return self._hidden(0, step) if handed is None else handed

    def picture_rows(self, step: Step) -> NDArray[np.float32]:
        return self._side_inputs.picture_rows(*step.shape)

    def _hidden(self, number: int, step: Step) -> NDArray[np.float32]:
        """One of the pair of hidden states [*step.shape, hidden]."""
        flat = self._buffers.hidden[number]
        return rows_of(flat, self._spec.hidden_size, *step.shape)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        check_step(step, self._limits, vocab_size=self._spec.vocab_size, mixes=self.mixes)
        self._graphs.check()
        slot, fills_up = self._place(step)
        if self._buffers.make_room_for_logits(step, step.batch + fills_up):
            self._forget_bindings()
        if hidden is not None and hidden.ctypes.data != self.receive_buffer(step).ctypes.data:
            self.receive_buffer(step)[...] = hidden
        if self._layout.kept_before:
            self._side_inputs.take_apart(self.receive_buffer(step), self._buffers.hidden[0])
        parts = parts_of(step, is_split=self._layout.is_split)
        shapes = self._buffers.fill(parts, slot, fills_up=fills_up)
        rows = step.rows + fills_up
        self._begin_step(rows)
        if self._graphs.embedding is not None:
            self._side_inputs.look_up(
                self._graphs.embedding, self._buffers, rows, has_pictures=hidden is not None
            )
        self._run(shapes, collective)
        self._side_inputs.forget_picture_rows()
        self._graphs.check()  # the weights did not change during the step
        self._wrote(step, slot)
        if self._layout.is_last_stage:
            rows = 0 if step.states else step.logit_rows
            computed = 1 if step.states else max(step.head_rows, 1)
            return self._buffers.logits(step.batch, computed)[:, computed - rows :]
        last = self._hidden(len(self._graphs.segments) % 2, step)
        return self._side_inputs.put_together(last)

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> HostLogits:
        logits = self.forward(step, hidden, collective)
        if step.states:
            logits = self._buffers.logits(step.batch, 1)
        # The buffer of the last graph's hidden state, which is free because the head has no such
        # output.
        last = self._buffers.hidden[len(self._graphs.segments) % 2]
        states = rows_of(last, self._spec.hidden_size, step.batch, step.head_rows)
        return HostLogits(logits, states[:, step.head_rows - step.logit_rows :])

    def interrupt(self) -> None:
        self._run_options.terminate = True

    def _run(self, shapes: Sequence[StepShape], collective: Collective) -> None:
        """Run the segments in turn. The sum of one half overlaps the computation of the other."""
        graphs, buffers = self._graphs, self._buffers
        under_way: list[BackgroundWork | None] = [None] * len(shapes)
        for index, segment in enumerate(graphs.segments):
            graphs.begin(index)
            layer = segment.cache_layer
            cache = None if layer is None else self._cache_of(layer)
            if cache is not None:
                self._moves.begin(cache)
            for half, shape in enumerate(shapes):
                _wait(under_way[half])
                if segment.outputs == _OF_THE_HEAD and not shape.rows:
                    # The head of a chunk without logits. An observed head has further outputs and
                    # is not skipped.
                    continue
                self._compute(index, shape)
                if segment.reduce is None:
                    continue
                written = buffers.hidden if segment.reduce == "hidden" else buffers.partial
                array = rows_of(
                    written[(index + 1) % 2],
                    segment.partial_parts * self._spec.hidden_size,
                    shape.asked,
                    shape.tokens,
                    shape.first_token,
                )
                if segment.partial_is_zero:
                    array.fill(0)
                if len(shapes) == 1:
                    collective.all_reduce(array)
                else:
                    under_way[half] = collective.begin_all_reduce(array)
            graphs.end(index)
            if cache is not None:
                self._moves.end(cache)
        for work in under_way:
            _wait(work)


def _wait(work: BackgroundWork | None) -> None:
    if work is not None:
        work.wait()
