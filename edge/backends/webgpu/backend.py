"""GPUs of every vendor, by ONNX Runtime's WebGPU provider: Vulkan, Direct3D 12 or Metal.

The graphs are those of CPU peers (`edge/backends/onnx`). Weights, keys, values and states are on
the adapter.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.interface import ShardWeights
from edge.backends.onnx.proof import proof
from edge.backends.onnx.self_check import run_self_check
from edge.backends.onnx.speed import decode_seconds
from edge.backends.shard_arrays import ShardArrays
from edge.backends.webgpu.attention_probe import LONG_STEP
from edge.backends.webgpu.device import Device
from edge.backends.webgpu.graphs import DeviceGraphs
from edge.backends.webgpu.kv_cache import check_kv_dtype
from edge.backends.webgpu.program import WebGpuProgram
from edge.errors import RequestError
from edge.host.free_memory import usable_memory_bytes
from edge.host.gpu_adapters import (
    WEBGPU_PACKAGE,
    allows_software,
    gpu_adapters,
    has_webgpu_package,
    why_no_adapter,
)
from edge.kernels.onnx_graph import WEBGPU
from edge.memory.step_memory import keeps_windows
from edge.models.spec import (
    FILE_BLOCKS,
    FURTHER_HEAD,
    PLACED_PICTURES,
    ROUNDED_KV,
    TILED_ATTENTION,
    WEIGHTS_ON_DISK,
    WINDOW_READS,
    WINDOWED_KV,
    ModelSpec,
)
from edge.offload import KVTier
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.layout import ShardLayout

ROUNDED_TO = 2 / 3
"""Share of an adapter's memory that arrays may have: the provider rounds their sizes up and keeps
buffers of copies. Arrays of 1 to 300 MB took 1.5 times their size in the median (SwiftShader)."""

KEPT_FREE_BYTES = 1 << 30
"""Memory of an adapter that is left for its driver and for a desktop."""


def open_backend(*, threads: int) -> WebGpuBackend:
    return WebGpuBackend(threads=threads)


class WebGpuBackend:
    """The adapter that WebGPU chooses."""

    name = "webgpu"
    lacks = frozenset(
        (
            *(WEIGHTS_ON_DISK, ROUNDED_KV, WINDOWED_KV),
            *(PLACED_PICTURES, FURTHER_HEAD, FILE_BLOCKS, TILED_ATTENTION, WINDOW_READS),
        )
    )

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._device: Device | None = None

    @property
    def is_stand_in(self) -> bool:
        adapter = self._opened().adapter
        return adapter is not None and adapter.kind == "software"

    @property
    def device_name(self) -> str:
        return self._opened().name

    @property
    def has_own_memory(self) -> bool:
        adapter = self._opened().adapter
        return adapter is not None and adapter.kind == "discrete"

    def usable_memory_bytes(self) -> int:
        adapter = self._opened().adapter
        if adapter is None or not self.has_own_memory:
            return usable_memory_bytes()
        free_bytes = adapter.memory_bytes if adapter.free_bytes is None else adapter.free_bytes
        return int(max(free_bytes - KEPT_FREE_BYTES, free_bytes // 2) * ROUNDED_TO)

    def copy_bytes_per_s(self) -> float | None:
        return self._opened().copy_bytes_per_s() if self.has_own_memory else None

    def decode_seconds(self) -> float:
        """Seconds of a token's products, see `edge.backends.onnx.speed`."""
        return decode_seconds(self._opened().session, provider=WEBGPU)

    def prove(self, weight_format: WeightFormat, seed: int) -> list[NDArray[np.float32]]:
        return proof(weight_format, seed, self._opened().session, provider=WEBGPU)

    def why_not(self) -> str | None:
        if not has_webgpu_package():
            return (
                f"{WEBGPU_PACKAGE} cannot be imported; pip install edge-inference[webgpu] on this "
                "device"
            )
        if not gpu_adapters(allow_software=allows_software()):
            return why_no_adapter()
        try:
            self._opened()
        except Exception as error:  # onnxruntime and the loader of its library raise plain ones
            return str(error)
        return None

    def load(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        weights: ShardWeights,
        weight_format: WeightFormat,
        *,
        limits: StepLimits,
        kv_dtype: KvDtype = "float32",
        kv_tier: KVTier | None = None,
    ) -> WebGpuProgram:
        check_kv_dtype(kv_dtype)
        if keeps_windows(spec):
            raise RequestError(
                "a WebGPU peer keeps the keys and values of all tokens in layers with a sliding "
                "window"
            )
        if layout.streamed_layers:
            raise RequestError("a WebGPU peer computes only from its adapter's memory")
        if limits.observes:
            raise RequestError(
                "a WebGPU peer does not observe the inputs of products",
                remedy="start the peer with --backend ort for this study",
            )
        device = self._opened()
        arrays = ShardArrays(layout, weights, weight_format)
        check = partial(run_self_check, spec, arrays, device.session, device_name=device.name)
        self_check = check(provider=WEBGPU)
        check(provider=device.long_steps, steps=(LONG_STEP,))
        embedding: EmbeddingRows | None = None
        if layout.is_first_stage or layout.token_columns:
            embedding = EmbeddingRows(
                weights, layout.embedding, spec.hidden_size, scale=spec.embedding_scale
            )
        try:
            graphs = DeviceGraphs(
                spec,
                arrays,
                weight_format,
                device,
                cut_layers=limits.exceeds_memory,
                embedding=embedding,
            )
        except BaseException:
            if embedding is not None:
                embedding.close()
            raise
        return WebGpuProgram(
            spec,
            layout,
            graphs,
            device,
            self_check=self_check,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
            kv_tier=kv_tier,
        )

    def _opened(self) -> Device:
        if self._device is None or self._device.is_lost:
            self._device = Device(self._threads)
        return self._device
