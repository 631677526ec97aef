"""One shard on the adapter: its graphs, its buffers, and the caches of its requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import WeightReads
from edge.backends.kv_storage import SwappedKv
from edge.backends.kv_swap import CacheMoves
from edge.backends.onnx.runtime import ort
from edge.backends.onnx.self_check import SelfCheck
from edge.backends.onnx.step_buffers import StepShape
from edge.backends.onnx.steps import GraphSteps
from edge.backends.webgpu.bindings import Bindings
from edge.backends.webgpu.device import Device
from edge.backends.webgpu.graphs import DeviceGraphs
from edge.backends.webgpu.kv_cache import DeviceCache
from edge.errors import CapacityError, DeviceLostError, RequestError
from edge.models.spec import ModelSpec
from edge.offload import KVTier
from edge.protocol.step import Step, StepLimits
from edge.weights.layout import ShardLayout


class WebGpuProgram(GraphSteps[DeviceGraphs], SwappedKv):
    """See StageProgram. Between two graphs only what is summed over shards passes through the
    host."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        graphs: DeviceGraphs,
        device: Device,
        *,
        self_check: SelfCheck,
        weight_bytes: int,
        limits: StepLimits,
        kv_tier: KVTier | None,
    ) -> None:
        super().__init__(spec, layout, limits)
        self.weight_bytes = weight_bytes
        self.rows_agree = self_check.of_chunks
        self.batches_agree = self_check.of_single
        self._graphs = graphs
        self._device = device
        self._kv_tier = kv_tier
        self._cache = DeviceCache(layout, limits, device)
        self._moves = CacheMoves(self._cache, self._cache.shape, kv_tier, limits)
        self._slots: list[int] = []
        """Slots of the step's requests."""
        self._ends: list[int] = []
        """Tokens of each of them after the step."""
        self._bindings = Bindings(spec, layout, limits, graphs, device, self._cache)
        self._cache.let_go = self._bindings.let_go

    @property
    def disk_wait_s(self) -> float:
        return self._moves.wait_s

    @property
    def weight_reads(self) -> WeightReads:
        return WeightReads()

    def gram(self, run: int) -> NDArray[np.float32]:
        return self._buffers.grams[run]

    def calibrate(self, request: str) -> None:
        """Only releases the request, because keys and values are not rounded here."""
        self.release(request)

    def stream(self, layers: int) -> None:
        if layers:
            raise RequestError("a WebGPU peer computes only from its adapter's memory")

    @property
    def cache_digest(self) -> str:
        return f"webgpu {ort.__version__} {self._device.identity}"

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        return self._cache.new_rows(tokens)

    def rows(
        self, request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        if request not in self._cache or not self._moves.is_inside(request):
            return None
        slot = self._cache.open(request)
        if self._cache.length(slot) < last:
            return None
        layers = range(self._cache.shape.num_layers)
        with self._losing():
            return [each for layer in layers for each in self._cache.rows(layer, slot, first, last)]

    def put_rows(
        self, request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        slot = self._cache.open(request)
        with self._losing():
            for layer in range(self._cache.shape.num_layers):
                keys, values = rows[2 * layer : 2 * layer + 2]
                self._cache.put(layer, slot, first, keys, values)
                self._cache.wrote(slot, first + keys.shape[1])

    def swap_out(self, request: str) -> None:
        with self._losing():
            super().swap_out(request)

    def keep(self, request: str, tokens: int) -> None:
        with self._losing():
            super().keep(request, tokens)

    def save_state(self, request: str, tokens: int, place: int) -> None:
        with self._losing():
            super().save_state(request, tokens, place)

    def states(self, request: str, tokens: int) -> list[NDArray[Any]] | None:
        with self._losing():
            return super().states(request, tokens)

    def put_states(self, request: str, tokens: int, states: Sequence[NDArray[Any]]) -> None:
        with self._losing():
            super().put_states(request, tokens, states)

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        with self._losing():
            return super().take(request, source, tokens, moves=moves)

    def release(self, request: str) -> None:
        self._cache.release(request)
        self._moves.drop(request)

    def reset(self) -> bool:
        if self._kv_tier is not None:
            return False
        self._cache.clear()
        self._moves.clear()
        self._run_options.terminate = False
        return True

    def close(self) -> None:
        self._moves.close()
        self._cache.clear()
        with self._device.used():
            self._bindings.clear()
            self._graphs.close()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Context in which too little of the adapter's memory is its loss, too. A step that was
        interrupted is none."""
        try:
            yield
        except (CapacityError, DeviceLostError) as error:
            if self._run_options.terminate:
                raise RuntimeError("the step was told to terminate") from error
            self._device.is_lost = True
            raise DeviceLostError(str(error)) from error

    def _place(self, step: Step) -> tuple[int, bool]:
        with self._losing():
            self._moves.arrive(step)
            self._cache.arrive()
            self._slots = self._cache.place(step)
        self._ends = [entry.end for entry in step.entries]
        return 0, False

    def _forget_bindings(self) -> None:
        self._bindings.clear()

    def _begin_step(self, rows: int) -> None:
        """Does nothing."""

    def _cache_of(self, layer: int) -> int:
        return self._cache.numbers[layer]

    def _wrote(self, step: Step, slot: int) -> None:
        for own, end in zip(self._slots, self._ends, strict=True):
            self._cache.wrote(own, end)

    def _compute(self, index: int, shape: StepShape) -> None:
        layer = self._graphs.segments[index].cache_layer
        with self._losing(), self._device.used():
            if layer is not None and self._limits.exceeds_memory:
                for slot, end in zip(self._slots, self._ends, strict=True):
                    self._cache.bring(slot, self._cache.numbers[layer], end)
            bound = self._bindings.of(index, shape, self._buffers, self._side_inputs)
            bound.run(self._cache.bound(self._slots), self._run_options)
            self._cache.turn_states(self._slots, bound.states)
