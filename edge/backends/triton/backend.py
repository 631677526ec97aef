"""GPU peers: a shard as Triton kernels. Under TRITON_INTERPRET=1 the same kernels run on a CPU.

torch and Triton are imported only when a shard is loaded or the device is examined.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from edge.backends.interface import ShardWeights
from edge.errors import CapacityError, RequestError
from edge.host.free_memory import format_size, usable_memory_bytes
from edge.memory.step_memory import keeps_windows
from edge.models.spec import (
    ALL_NEEDS,
    FILE_BLOCKS,
    PLACED_PICTURES,
    TILED_ATTENTION,
    WINDOWED_KV,
    ModelSpec,
)
from edge.offload import KVTier
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, WeightFormat, kv_bits
from edge.weights.layout import ShardLayout

if TYPE_CHECKING:
    from edge.backends.triton.device import Device
    from edge.backends.triton.program import TritonProgram

PART_KINDS = frozenset(
    ("attention", "experts", "gated_mlp", "linear_attention", "plain_mlp", "short_convolution")
)
"""Parts for which `layers.py` has blocks, repeated here so that a refusal needs no torch."""

_FURTHER = frozenset(
    (
        *("gates of attention", "latent attention", "norms of values", "norms with biases"),
        *("attention sinks", "inputs of each layer by token", "keys of another layer"),
        *("learned positions", "scaled layers"),
    )
)
"""Further `ALL_NEEDS` that it supports."""

KEPT_FREE_BYTES = 1 << 30
"""GPU memory that is left for activations, for CUDA itself, and for a desktop."""


def open_backend(*, threads: int) -> TritonBackend:
    return TritonBackend(threads=threads)


class TritonBackend:
    """The first CUDA GPU of this process.

    With accuracy "fast", products with int4 and int8 weights are computed in bfloat16, and float KV
    caches are stored in it. With accuracy "high", with float32 weights, and when kernels are
    interpreted, everything is float32. Sums inside a product are always float32.
    """

    name = "triton"
    # Attention holds no scores either, but what it holds on a GPU was not measured.
    lacks = (ALL_NEEDS - PART_KINDS - _FURTHER) | {
        *(WINDOWED_KV, PLACED_PICTURES, FILE_BLOCKS, TILED_ATTENTION)
    }

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._device: Device | None = None

    def why_not(self) -> str | None:
        missing = [n for n in ("torch", "triton") if importlib.util.find_spec(n) is None]
        if missing:
            return (
                f"{' and '.join(missing)} cannot be imported; pip install edge-inference[gpu] on "
                "this device"
            )
        import torch

        from edge.backends.triton.device import is_interpreted

        if is_interpreted() or torch.cuda.is_available():
            return None
        return (
            "PyTorch sees no CUDA device; install the NVIDIA driver and a PyTorch built for it, or "
            "start the peer with --backend ort (TRITON_INTERPRET=1 computes on the CPU, for tests: "
            "thousands of times slower)"
        )

    @property
    def is_stand_in(self) -> bool:
        from edge.backends.triton.device import is_interpreted

        return is_interpreted()

    @property
    def device_name(self) -> str:
        return self._opened().name

    @property
    def has_own_memory(self) -> bool:
        return self._opened().is_gpu

    def usable_memory_bytes(self) -> int:
        device = self._opened()
        if not device.is_gpu:
            return usable_memory_bytes()
        free_bytes = device.free_bytes()
        return max(free_bytes - KEPT_FREE_BYTES, free_bytes // 2)

    def copy_bytes_per_s(self) -> float | None:
        return self._opened().copy_bytes_per_s()

    def prove(self, weight_format: WeightFormat, seed: int) -> None:
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
    ) -> TritonProgram:
        """See Backend. Raises RequestError if kernels compute wrongly or are missing."""
        needs = (*spec.needs, *((WINDOWED_KV,) if keeps_windows(spec) else ()))
        if missing := [each for each in needs if each in self.lacks]:
            raise RequestError(
                f"a GPU peer has no kernel for {', '.join(missing)}, which this model needs",
                remedy="start the peer with --backend ort, so that this device's CPU computes it",
            )
        import torch

        from edge.backends.triton.loading import load

        device = self._opened()
        torch.set_num_threads(self._threads)
        try:
            return load(
                device,
                spec,
                layout,
                weights,
                weight_format,
                limits=limits,
                bits=kv_bits(kv_dtype),
                kv_tier=kv_tier,
            )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU ({device.name}) has {format_size(device.free_bytes())} free, too little "
                "for this shard",
                remedy="end other programs that use it, or share the model with more peers",
            ) from error

    def _opened(self) -> Device:
        from edge.backends.triton.device import Device

        if self._device is None:
            self._device = Device()
        return self._device
