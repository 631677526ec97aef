"""One shard's ONNX Runtime sessions over buffers made once.

A step copies and allocates nothing: every input and output is bound to a long-lived numpy buffer,
and the present KV to the past KV, so attention appends in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import HostLogits, WeightReads, check_step
from edge.backends.kv_storage import HostKvStorage
from edge.backends.kv_swap import CacheMoves
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.self_check import SelfCheck
from edge.backends.onnx.side_inputs import SideInputs
from edge.backends.onnx.step_buffers import StepBuffers, StepShape, rows_of
from edge.backends.ort.arena import Arena
from edge.backends.ort.bindings import Bindings
from edge.backends.ort.expert_runs import ExpertRuns
from edge.backends.ort.kv_cache import OrtCache
from edge.backends.ort.open_graphs import NO_GRAPHS, OpenGraphs
from edge.backends.overlap import parts_of
from edge.kernels.kv_cache.cache_size import keeps_remainders
from edge.memory.lending import Lending
from edge.memory.step_memory import Widths
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import Step, StepLimits
from edge.transport import BackgroundWork, Collective
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout

_OF_THE_HEAD = ("states", "logits")
"""Outputs of a graph that is only the head."""


class OrtProgram(HostKvStorage):
    """One shard's sessions, their buffers, and the KV caches of its requests. See StageProgram."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        open_graphs: Callable[[int | None, int], OpenGraphs],
        *,
        self_check: SelfCheck,
        weight_bytes: int,
        limits: StepLimits,
        kv_dtype: KvDtype,
        arena: Arena,
        lends_buffers: bool = False,
        kv_tier: KVTier | None = None,
    ) -> None:
        """open_graphs: makes the sessions, for the bits of the KV cache (None: float32) and the
        number of layers on disk. lends_buffers: see `ShardWeights`."""
        self._kv_bits = kv_bits(kv_dtype)
        # The order of sums over remainders depends on the division into steps.
        self.rows_agree = self_check.of_chunks and not keeps_remainders(self._kv_bits)
        self._fills_up = limits.batch_invariant and self_check.of_pairs and not self_check.of_single
        self.batches_agree = self_check.of_single or self._fills_up
        self.weight_bytes = weight_bytes
        self._spec = spec
        self._layout = layout
        self._limits = limits
        self._open_graphs = open_graphs
        self._arena = arena
        self._run_options = ort.RunOptions()
        # The value that stands for "none". ONNX Runtime's Python code reads the entry in each run,
        # and a missing entry costs a C++ exception, 60 us a run.
        self._run_options.add_run_config_entry("gpu_graph_id", "0")
        self._kv_dtype = kv_dtype
        self._lends_buffers = lends_buffers
        self._lending: Lending | None = None
        self._unused_bytes = 0
        """Bytes of memory that the last step left unused."""
        self._kv_tier = kv_tier
        self._graph_bits: int | None = None
        self._cache: OrtCache = OrtCache(layout, limits)
        self._moves = CacheMoves(self._cache.pool, self._cache.shape, kv_tier, limits)
        self._buffers = StepBuffers(spec, layout, limits)
        self._side_inputs = SideInputs(spec, layout, limits)
        self._bindings = Bindings(self._buffers, self._side_inputs)
        self._experts: ExpertRuns | None = None
        """Set if layers may be on disk."""
        try:
            # Last, because it may begin to read from disk. The cache is float32 until `calibrate`,
            # because the scales of codes follow from keys and values.
            self._use(open_graphs(None, layout.streamed_layers))
        except BaseException:
            self._cache.pool.close()
            raise

    device_sums = None

    @property
    def disk_wait_s(self) -> float:
        streamed = self._graphs.streamed
        return self._moves.wait_s + (0.0 if streamed is None else streamed.wait_s)

    @property
    def weight_reads(self) -> WeightReads:
        streamed = self._graphs.streamed
        return WeightReads() if streamed is None else streamed.reads

    def receive_buffer(self, step: Step) -> NDArray[np.float32]:
        handed = self._side_inputs.handed(step.batch, step.num_tokens)
        return self._hidden(0, step) if handed is None else handed

    def _hidden(self, number: int, step: Step) -> NDArray[np.float32]:
        """One of the pair of hidden states [batch, tokens, hidden]."""
        flat = self._buffers.hidden[number]
        return rows_of(flat, self._spec.hidden_size, step.batch, step.num_tokens)

    def forward(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> NDArray[np.float32]:
        check_step(step, self._limits, vocab_size=self._spec.vocab_size)
        self._graphs.check()
        self._lend(step)
        self._moves.arrive(step)
        # Products take rows in pairs, and a single last row is rounded in another way.
        fills_up = self._fills_up and step.num_tokens == 1 and step.batch % 2 == 1
        slot = self._cache.pool.gather([entry.request for entry in step.entries], spare=fills_up)
        if self._buffers.make_room_for_logits(step, step.batch + step.batch % 2 * self._fills_up):
            self._bindings.clear()
        if hidden is not None and hidden.ctypes.data != self.receive_buffer(step).ctypes.data:
            self.receive_buffer(step)[...] = hidden
        if self._layout.kept_before:
            self._side_inputs.take_apart(self.receive_buffer(step), self._buffers.hidden[0])
        parts = parts_of(step, is_split=self._layout.is_split)
        shapes = self._buffers.fill(parts, slot, fills_up=fills_up)
        rows = step.batch * step.num_tokens + fills_up
        self._arena.before_step(rows)
        if self._experts is not None:
            self._experts.before_step(rows)
        if self._graphs.embedding is not None:
            self._side_inputs.look_up(self._graphs.embedding, self._buffers, rows)
        self._run(shapes, collective)
        self._graphs.check()  # the weights did not change during the step
        for offset, entry in enumerate(step.entries):
            self._cache.pool.wrote(slot + offset, entry.end)
        if self._layout.is_last_stage:
            rows = 0 if step.states else step.logit_rows
            return self._buffers.logits(step.batch, max(rows, 1))[:, :rows]
        last = self._hidden(len(self._graphs.segments) % 2, step)
        return self._side_inputs.put_together(last)

    def logits(
        self, step: Step, hidden: NDArray[np.float32] | None, collective: Collective
    ) -> HostLogits:
        logits = self.forward(step, hidden, collective)
        # The buffer of the last graph's hidden state, which is free because the head has no such
        # output.
        last = self._buffers.hidden[len(self._graphs.segments) % 2]
        states = rows_of(last, self._spec.hidden_size, step.batch, step.logit_rows)
        return HostLogits(logits, states)

    def gram(self, run: int) -> NDArray[np.float32]:
        return self._buffers.grams[run]

    def calibrate(self, request: str) -> None:
        if self._kv_bits is None:
            self.release(request)
            return
        cache = self._cache.with_codes(request, self._kv_bits)
        self._bindings.clear()
        self._cache.pool.close()
        self._cache = cache
        self._moves = CacheMoves(cache.pool, cache.shape, self._kv_tier, self._limits)
        streamed = self._graphs.streamed
        layers = streamed.streamed if streamed is not None else 0
        self._drop_graphs()  # first, because the weights fit into memory only once
        self._arena.give_back()
        self._use(self._open_graphs(self._kv_bits, layers))
        self._graph_bits = self._kv_bits

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        self._lend(None)
        super().put_rows(request, first, rows)

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        self._lend(None)
        return super().take(request, source, tokens, moves=moves)

    def stream(self, layers: int) -> None:
        streamed, experts = self._graphs.streamed, self._experts
        has_experts = experts is not None and experts.has_experts
        # Layers that were all resident are not cut at their experts.
        is_cut = streamed is not None and not (streamed.brings_whole_layers and has_experts)
        if streamed is not None and (is_cut or not layers):
            streamed.stream(layers, self._layout.streaming(layers).kept_experts)
        elif layers:
            self._bindings.clear()
            self._drop_graphs()  # first, because there may be no room for both
            self._arena.give_back()
            try:
                self._use(self._open_graphs(self._graph_bits, layers))
            except BaseException:
                self._use(self._open_graphs(self._graph_bits, 0))
                raise

    @property
    def cache_digest(self) -> str:
        if not self._cache.pool.can_cut:
            return ""
        long = [each.is_long(self._limits.context_tokens) for each in self._layout.rotations]
        return f"onnxruntime {ort.__version__} {self._cache.digest} {long}"

    def interrupt(self) -> None:
        self._run_options.terminate = True

    def reset(self) -> bool:
        if self._kv_bits is not None or self._kv_tier is not None or self._limits.observes:
            return False
        if self._graphs.streamed is not None:
            return False
        self._graphs.check()
        self._bindings.clear()
        self._cache.pool.clear()
        self._moves.clear()
        self._run_options.terminate = False
        return True

    def close(self) -> None:
        self._bindings.clear()
        self._drop_graphs()
        self._moves.close()
        self._cache.pool.close()
        self._arena.give_back()

    def _use(self, graphs: OpenGraphs) -> None:
        self._graphs, self._lending = graphs, None
        if graphs.streamed is not None:
            if self._experts is None:
                self._experts = ExpertRuns(
                    self._spec, self._layout, self._limits, self._buffers, self._run_options
                )
            self._lending = Lending(
                widths=Widths.of_shard(self._spec, self._layout, kv_dtype=self._kv_dtype),
                limits=self._limits,
                lends_buffers=self._lends_buffers,
            )

    def _lend(self, step: Step | None) -> None:
        """Lend memory that this step and the last one leave unused to streamed weights. None: lend
        nothing, because keys and values arrive outside of steps."""
        streamed, lending, pool = self._graphs.streamed, self._lending, self._cache.pool
        if streamed is None or lending is None:
            return
        unused = 0
        if step is not None:
            ends = {entry.request: entry.end for entry in step.entries}
            others = [pool.length(slot) for slot, name in pool.slots if name not in ends]
            rows = step.batch * step.num_tokens
            unused = lending.unused_bytes(rows, (*ends.values(), *others))
        streamed.lend(min(unused, self._unused_bytes))
        self._unused_bytes = unused

    def _drop_graphs(self) -> None:
        graphs, self._graphs = self._graphs, NO_GRAPHS
        graphs.close()

    def _run(self, shapes: list[StepShape], collective: Collective) -> None:
        """Run the segments in turn. The sum of one half overlaps the computation of the other."""
        bindings = [self._bindings.of(shape) for shape in shapes]
        graphs, buffers, experts = self._graphs, self._buffers, self._experts
        under_way: list[BackgroundWork | None] = [None] * len(shapes)
        for index, segment in enumerate(graphs.segments):
            graphs.begin(index)
            layer = segment.cache_layer
            if layer is not None:
                self._moves.begin(self._cache.numbers[layer])
            for half, shape in enumerate(shapes):
                _wait(under_way[half])
                if segment.outputs == _OF_THE_HEAD and not shape.rows:
                    # The head of a chunk without logits. An observed head has further outputs and
                    # is not skipped.
                    continue
                binding = bindings[half].get(index)
                if binding is None:
                    binding = self._bindings.bind(index, shape, graphs, self._cache, experts)
                    bindings[half][index] = binding
                graphs.sessions[index].run_with_iobinding(binding, self._run_options)
                if segment.streamed is not None and segment.streamed.experts is not None:
                    assert experts is not None
                    experts.run(index, shape, graphs)
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
            if layer is not None:
                self._moves.end(self._cache.numbers[layer])
        for work in under_way:
            _wait(work)


def _wait(work: BackgroundWork | None) -> None:
    if work is not None:
        work.wait()
