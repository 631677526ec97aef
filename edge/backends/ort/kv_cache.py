"""The KV caches of one shard as its graphs take them: float32, or codes and their scales."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.host_cache import HostCache
from edge.kernels.kv_cache.cache_size import cache_head_size, keeps_unrounded, unrounded_shape
from edge.kernels.kv_cache.channel_cache import choose_scales
from edge.kernels.rope.reference import rope
from edge.models.rotary import Rotary
from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout

_SHIFTS = 8
"""Positions in the context to which keys are rotated before their scales are chosen."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerScales:
    """Scales of one layer's codes: float32 [1, num_kv_heads, 1, channels]."""

    keys: Array
    values: Array


class OrtCache(HostCache):
    """The host's KV caches, with the scales of each layer if they hold codes."""

    def __init__(
        self,
        layout: ShardLayout,
        limits: StepLimits,
        *,
        bits: int | None = None,
        scales: Sequence[LayerScales] = (),
    ) -> None:
        """bits: of a code, with the scales of every layer; None for float32."""
        self._unrounded = tuple(layout.caches if keeps_unrounded(bits) else ())
        super().__init__(
            layout,
            limits,
            bits=bits,
            beside=[
                unrounded_shape(each.num_kv_heads, each.head_size)
                for each in map(layout.caches.__getitem__, self._unrounded)
            ],
        )
        self._layout = layout
        self._limits = limits
        self._scales = tuple(scales)
        self._scale_numbers = {layer: number for number, layer in enumerate(layout.caches)}

    @property
    def is_float(self) -> bool:
        """Whether it holds no codes."""
        return not self._scales

    @property
    def digest(self) -> str:
        """A digest of the scales, and of how the newest tokens lie beside codes; equal for all
        float32 caches."""
        digest = hashlib.sha256(b"unrounded by place" if self._unrounded else b"")
        for each in self._scales:
            digest.update(each.keys.tobytes() + each.values.tobytes())
        return digest.hexdigest()

    def bound(self, slot: int, batch: int) -> dict[str, NDArray[Any]]:
        """Arrays for the inputs and outputs of all layers, by name, for these slots."""
        arrays: dict[str, NDArray[Any]] = {}
        for layer in self._layout.attentions:
            keys, values = self.layer(layer, slot, batch)
            # Present and past are the same array, so attention appends in place.
            arrays[f"past_key_{layer}"] = arrays[f"present_key_{layer}"] = keys
            arrays[f"past_value_{layer}"] = arrays[f"present_value_{layer}"] = values
            if self._scales:
                number = self._scale_numbers[self._layout.cache_layer(layer)]
                arrays[f"key_scales_{layer}"] = self._scales[number].keys
                arrays[f"value_scales_{layer}"] = self._scales[number].values
        # Inputs are `past_…_N`, outputs `present_…_N`, in the order of `state_shapes`.
        states = self._layout.states.items()
        names = [(layer, name) for layer, part in states for name in part.state_names]
        names += [(layer, "unrounded") for layer in self._unrounded]
        for (layer, name), state in zip(names, self.pool.states(slot, batch), strict=True):
            # One buffer for both, because the kernels read the past before they write.
            arrays[f"past_{name}_{layer}"] = arrays[f"present_{name}_{layer}"] = state
        return arrays

    def with_codes(self, request: str, bits: int) -> OrtCache:
        """An empty cache of codes, with scales for the keys and values that `request` has here.

        Rotary embedding mixes pairs of a key's channels by position, so a channel may grow to the
        norm of its pair. Scales are therefore chosen for the keys at several other positions, too.
        """
        slot = self.pool.open(request)
        length = self.pool.length(slot)
        last = self._limits.context_tokens - length
        shifts = np.unique(np.linspace(0, last, _SHIFTS).astype(np.int64))

        def scales_of(samples: Iterator[Array], size: int, *, may_clip: bool) -> Array:
            """Scales from samples [tokens, 1, size], one head at a time to limit memory."""
            chosen = np.concatenate(
                [choose_scales(each, bits=bits, may_clip=may_clip) for each in samples]
            )
            channels = cache_head_size(size, bits)
            padded = np.pad(chosen, [(0, 0), (0, channels - size)], constant_values=1)
            return np.ascontiguousarray(padded[None, :, None])

        def turned(heads: list[Array], rotary: Rotary) -> Iterator[Array]:
            frequencies = rotary.frequencies(self._limits.context_tokens)
            angles = np.multiply.outer(shifts, frequencies)[:, None]
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            for keys in heads:
                yield np.concatenate(
                    [
                        rope(keys, c, s, interleaved=rotary.is_interleaved)
                        for c, s in zip(cos, sin, strict=True)
                    ]
                )

        scales = []
        for layer, mixer in self._layout.caches.items():
            size = mixer.head_size  # and windows have all tokens of a request so short
            keys, values = (
                [head[:length, None, :size] for head in array[0]]
                for array in self.layer(layer, slot, 1)
            )
            scales.append(
                LayerScales(
                    keys=scales_of(turned(keys, mixer.rotary), size, may_clip=False),
                    values=scales_of(iter(values), size, may_clip=True),
                )
            )
        return OrtCache(self._layout, self._limits, bits=bits, scales=scales)
