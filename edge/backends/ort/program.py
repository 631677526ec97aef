"""One shard's ONNX Runtime sessions over buffers made once.

A step copies and allocates nothing: every input and output is bound to a long-lived numpy buffer,
and the present KV to the past KV, so attention appends in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import WeightReads
from edge.backends.kv_storage import HostKvStorage
from edge.backends.kv_swap import CacheMoves
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.self_check import SelfCheck
from edge.backends.onnx.step_buffers import StepShape
from edge.backends.onnx.steps import GraphSteps
from edge.backends.ort.arena import Arena
from edge.backends.ort.bindings import Bindings
from edge.backends.ort.expert_runs import ExpertRuns
from edge.backends.ort.kv_cache import OrtCache
from edge.backends.ort.open_graphs import NO_GRAPHS, OpenGraphs
from edge.kernels.matmul_blocks.reference import OPERATOR_VERSION
from edge.kernels.onnx_graph import Provider
from edge.memory.lending import Lending
from edge.memory.step_memory import Widths
from edge.memory.windows import room_token_bytes
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import Step, StepLimits
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout


class OrtProgram(GraphSteps[OpenGraphs], HostKvStorage):
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
        provider: Provider,
        lends_buffers: bool = False,
        kv_tier: KVTier | None = None,
    ) -> None:
        """open_graphs: makes the sessions, for the bits of the KV cache (None: float32) and the
        number of layers on disk. lends_buffers: see `ShardWeights`."""
        super().__init__(spec, layout, limits)
        self._provider = provider
        self._widths = Widths.of_shard(
            spec, layout, kv_dtype=kv_dtype, has_tiles=provider.has_own_attention
        )
        self._kv_bits = kv_bits(kv_dtype)
        by_nodes = set(layout.attentions.values()) - self._widths.in_tiles
        self.rows_agree = self_check.of_chunks and all(each.latent is None for each in by_nodes)
        self._fills_up = limits.batch_invariant and self_check.of_pairs and not self_check.of_single
        self.batches_agree = self_check.of_single or self._fills_up
        self.mixes = (
            self.rows_agree
            and self_check.of_single
            and not (spec.has_states or limits.observes)
            and self._widths.in_tiles.issuperset(layout.attentions.values())
        )
        self.weight_bytes = weight_bytes
        self._open_graphs = open_graphs
        self._arena = arena
        self._kv_dtype = kv_dtype
        self._lends_buffers = lends_buffers
        self._lending: Lending | None = None
        self._unused_bytes = 0
        """Bytes of memory that the last step left unused."""
        self._kv_tier = kv_tier
        self._graph_bits: int | None = None
        self._cache: OrtCache = OrtCache(layout, limits)
        self._moves = self._moves_of(self._cache)
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

    @property
    def disk_wait_s(self) -> float:
        streamed = self._graphs.streamed
        return self._moves.wait_s + (0.0 if streamed is None else streamed.wait_s)

    @property
    def weight_reads(self) -> WeightReads:
        streamed = self._graphs.streamed
        return WeightReads() if streamed is None else streamed.reads

    def _place(self, step: Step) -> tuple[int, bool]:
        self._lend(step)
        self._moves.arrive(step)
        # Products take rows in pairs, and a single last row is rounded in another way.
        is_single = step.num_tokens == 1 and not step.is_mixed
        fills_up = self._fills_up and is_single and step.batch % 2 == 1
        requests = [entry.request for entry in step.entries]
        return self._cache.pool.gather(requests, spare=fills_up), fills_up

    def _forget_bindings(self) -> None:
        self._bindings.clear()

    def _begin_step(self, rows: int) -> None:
        self._arena.before_step(rows)
        if self._experts is not None:
            self._experts.before_step(rows)

    def _compute(self, index: int, shape: StepShape) -> None:
        graphs, experts = self._graphs, self._experts
        bindings = self._bindings.of(shape)
        binding = bindings.get(index)
        if binding is None:
            binding = self._bindings.bind(index, shape, graphs, self._cache, experts)
            bindings[index] = binding
        graphs.sessions[index].run_with_iobinding(binding, self._run_options)
        streamed = graphs.segments[index].streamed
        if streamed is not None and streamed.experts is not None:
            assert experts is not None
            experts.run(index, shape, graphs)

    def _moves_of(self, cache: OrtCache) -> CacheMoves:
        # Float32 before `calibrate`, for one request that was not planned with.
        kv_dtype = "float32" if cache.is_float else self._kv_dtype
        return CacheMoves(
            cache.pool,
            cache.shape,
            self._kv_tier,
            self._limits,
            cache.windows,
            token_bytes=room_token_bytes(self._spec, self._layout, kv_dtype),
        )

    def _cache_of(self, layer: int) -> int | None:
        return self._cache.numbers.get(layer)

    def _wrote(self, step: Step, slot: int) -> None:
        for offset, entry in enumerate(step.entries):
            self._cache.pool.wrote(slot + offset, entry.end)

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
        self._moves = self._moves_of(cache)
        streamed = self._graphs.streamed
        layers = streamed.streamed if streamed is not None else 0
        self._drop_graphs()  # first, because the weights fit into memory only once
        self._arena.give_back()
        self._use(self._open_graphs(self._kv_bits, layers))
        self._graph_bits = self._kv_bits

    def put_rows(
        self, request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        self._lend(None)
        super().put_rows(request, first, rows, windows=windows)

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
        # Last bits differ with the operator, as they do between processors.
        is_told = self._limits.batch_invariant and self._provider.has_own_attention
        own = f"attention {OPERATOR_VERSION} " if is_told else ""
        return f"onnxruntime {ort.__version__} {own}{self._cache.digest}"

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
                widths=self._widths,
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
            rows = step.rows
            unused = lending.unused_bytes(rows, (*ends.values(), *others))
        streamed.lend(min(unused, self._unused_bytes))
        self._unused_bytes = unused

    def _drop_graphs(self) -> None:
        graphs, self._graphs = self._graphs, NO_GRAPHS
        graphs.close()
