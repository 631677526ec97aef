"""The KV caches of one shard as its graphs take them: float32, or codes and their scales."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout
from kernels.kv_cache.cache_size import cache_head_size, cache_row
from kernels.kv_cache.channel_cache import choose_scales
from kernels.rope.reference import rope
from offload import KVLayer, KVPool, KVShape

_SHIFTS = 8
"""Places in the context that keys are turned to before their scales are chosen."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerScales:
    """What codes of one layer are multiplied by: float32 [1, num_kv_heads, 1, channels]."""

    keys: Array
    values: Array


class OrtCache:
    """The pool of a shard's KV caches and, if they are codes, the scales of each layer."""

    def __init__(
        self,
        layout: ShardLayout,
        limits: StepLimits,
        *,
        bits: int | None = None,
        scales: Sequence[LayerScales] = (),
    ) -> None:
        """`bits` of a code, with the `scales` of every layer; None for float32."""
        self._mixers = layout.mixers
        rows = [cache_row(mixer.head_size, bits) for mixer in self._mixers.values()]
        heads = [mixer.num_kv_heads for mixer in self._mixers.values()]
        dtype = cache_row(1, bits)[0]
        self.pool = KVPool(
            layers=[(count, elements) for count, (_, elements) in zip(heads, rows, strict=True)],
            slots=limits.requests,
            context_tokens=limits.context_tokens,
            dtype=dtype,
        )
        self.shape = KVShape(
            layers=tuple(
                KVLayer(num_kv_heads=count, row_bytes=elements * np.dtype(dtype).itemsize)
                for count, (_, elements) in zip(heads, rows, strict=True)
            ),
            context_tokens=limits.context_tokens,
        )
        """What a tier must keep of one request."""
        self.numbers = {layer: number for number, layer in enumerate(self._mixers)}
        """Of the layers that have a cache: how they are counted here."""
        self._layout = layout
        self._limits = limits
        self._scales = tuple(scales)

    @property
    def digest(self) -> str:
        """Of the scales; the same for every cache of float32."""
        digest = hashlib.sha256()
        for each in self._scales:
            digest.update(each.keys.tobytes() + each.values.tobytes())
        return digest.hexdigest()

    def bound(self, slot: int, batch: int) -> dict[str, NDArray[Any]]:
        """What every layer's inputs and outputs are bound to, by name, for these slots."""
        arrays: dict[str, NDArray[Any]] = {}
        for layer, number in self.numbers.items():
            keys, values = self.pool.layer(number, slot, batch)
            # Present is bound onto past: attention appends where the cache lies.
            arrays[f"past_key_{layer}"] = arrays[f"present_key_{layer}"] = keys
            arrays[f"past_value_{layer}"] = arrays[f"present_value_{layer}"] = values
            if self._scales:
                arrays[f"key_scales_{layer}"] = self._scales[number].keys
                arrays[f"value_scales_{layer}"] = self._scales[number].values
        return arrays

    def new_rows(self, tokens: int) -> list[NDArray[Any]]:
        """Memory for so many tokens in every layer, as `put_rows` takes it."""
        return [np.empty_like(array[:, :tokens], order="C") for array in self._of_slot(0)]

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last), layer by layer; None if there are fewer."""
        if request not in self.pool or self.pool.length(self.pool.open(request)) < last:
            return None
        return [array[:, first:last] for array in self._of_slot(self.pool.open(request))]

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        """Let the request have these from token `first` on."""
        slot = self.pool.open(request)
        length = first
        for array, some in zip(self._of_slot(slot), rows, strict=True):
            length = first + some.shape[1]
            array[:, first:length] = some
        self.pool.wrote(slot, length)

    def _of_slot(self, slot: int) -> Iterator[NDArray[Any]]:
        """Keys, then values [heads, tokens, elements] of every layer."""
        for number in range(self.shape.num_layers):
            for array in self.pool.layer(number, slot, 1):
                yield array[0]

    def with_codes(self, request: str, bits: int) -> OrtCache:
        """An empty cache of codes whose scales suit what `request` has in this one of float32.

        Each channel of a key is rotated against another as the position grows, so it may become as
        large as the two together: scales are chosen for the keys as they would be elsewhere in the
        context, too.
        """
        slot = self.pool.open(request)
        length = self.pool.length(slot)
        last = self._limits.context_tokens - length
        shifts = np.unique(np.linspace(0, last, _SHIFTS).astype(np.int64))

        def scales_of(samples: Iterator[Array], size: int, *, may_clip: bool) -> Array:
            """samples [tokens, 1, size] of one head after the other: all would take too much."""
            chosen = np.concatenate(
                [choose_scales(each, bits=bits, may_clip=may_clip) for each in samples]
            )
            channels = cache_head_size(size, bits)
            padded = np.pad(chosen, [(0, 0), (0, channels - size)], constant_values=1)
            return np.ascontiguousarray(padded[None, :, None])

        def turned(heads: list[Array], frequencies: tuple[float, ...]) -> Iterator[Array]:
            angles = np.multiply.outer(shifts, frequencies)[:, None]
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            for keys in heads:
                yield np.concatenate([rope(keys, c, s) for c, s in zip(cos, sin, strict=True)])

        scales = []
        for number, mixer in enumerate(self._mixers.values()):
            size = mixer.head_size
            keys, values = (
                [head[:length, None, :size] for head in array[0]]
                for array in self.pool.layer(number, slot, 1)
            )
            scales.append(
                LayerScales(
                    keys=scales_of(turned(keys, mixer.inverse_frequencies), size, may_clip=False),
                    values=scales_of(iter(values), size, may_clip=True),
                )
            )
        return OrtCache(self._layout, self._limits, bits=bits, scales=scales)
