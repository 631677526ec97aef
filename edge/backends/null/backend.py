"""A stand-in for a device, which counts steps and answers with made-up numbers.

For tests of code that uses a back end, and for plans of devices that are not here. It stores, swaps
and matches keys and values, and reads no weights.
"""

from __future__ import annotations

from edge.backends.interface import ShardWeights
from edge.backends.null.program import NullProgram
from edge.backends.null.tower import NullTower
from edge.errors import RequestError
from edge.host.free_memory import usable_memory_bytes
from edge.models.spec import FURTHER_HEAD, ModelSpec
from edge.models.towers.part import TowerPart
from edge.offload import KVTier
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, WeightFormat
from edge.weights.layout import ShardLayout


def open_backend(*, threads: int) -> NullBackend:
    return NullBackend()


class NullBackend:
    """See Backend. It runs everywhere, and is used only if it is named."""

    name = "null"
    lacks = frozenset(("linear_attention", "short_convolution", FURTHER_HEAD))
    is_stand_in = True
    device_name = "nothing, with made-up numbers"
    has_own_memory = False

    def usable_memory_bytes(self) -> int:
        return usable_memory_bytes()

    def copy_bytes_per_s(self) -> float | None:
        return None

    def prove(self, weight_format: WeightFormat, seed: int) -> None:
        return None

    def why_not(self) -> str | None:
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
    ) -> NullProgram:
        if limits.observes:
            raise RequestError(
                "the null back end has nothing to observe; start the peer with --backend ort"
            )
        if spec.has_states:
            raise RequestError(
                "the null back end has no states in place of keys and values; start the peer with "
                "--backend ort"
            )
        return NullProgram(
            spec,
            layout,
            weight_bytes=weights.manifest.total_bytes,
            limits=limits,
            kv_dtype=kv_dtype,
            kv_tier=kv_tier,
        )

    def load_tower(
        self, part: TowerPart, weights: ShardWeights, weight_format: WeightFormat
    ) -> NullTower:
        """See `open_tower`."""
        return NullTower(part, weight_bytes=weights.manifest.total_bytes)
