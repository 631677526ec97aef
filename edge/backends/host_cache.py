"""The KV caches of one shard in the host's memory, and access to their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.kv_cache.cache_size import cache_row
from edge.offload import KVLayer, KVPool, KVShape
from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout


class HostCache:
    """The pool of a shard's KV caches: float32, or codes of `bits`."""

    def __init__(
        self,
        layout: ShardLayout,
        limits: StepLimits,
        *,
        bits: int | None,
        beside: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """beside: shapes of further float32 arrays of each request."""
        caches, states = layout.caches, layout.states
        rows = [cache_row(each.cached_size, bits) for each in caches.values()]
        heads = [each.num_kv_heads for each in caches.values()]
        dtype = cache_row(1, bits)[0]
        shapes = [shape for each in states.values() for shape in each.state_shapes]
        shapes += beside
        self.pool = KVPool(
            layers=[(count, elements) for count, (_, elements) in zip(heads, rows, strict=True)],
            slots=limits.caches,
            context_tokens=limits.context_tokens,
            dtype=dtype,
            states=shapes,
            most_states=limits.requests,
            places=limits.state_places if shapes else 0,
        )
        self.shape = KVShape(
            layers=tuple(
                KVLayer(num_kv_heads=count, row_bytes=elements * np.dtype(dtype).itemsize)
                for count, (_, elements) in zip(heads, rows, strict=True)
            ),
            context_tokens=limits.context_tokens,
        )
        """The shape of one request's keys and values in a tier."""
        numbers = {layer: number for number, layer in enumerate(caches)}
        self.numbers = {layer: numbers[layout.cache_layer(layer)] for layer in layout.attentions}
        """The index of the cache that each layer uses."""

    def new_rows(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays for N tokens in every layer, as `put_rows` takes them."""
        return [np.empty_like(array[:, :tokens], order="C") for array in self._of_slot(0)]

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last), layer by layer; None if the request has fewer
        tokens."""
        if request not in self.pool:
            return None
        slot = self.pool.open(request)
        if self.pool.length(slot) < last:
            return None
        layers = range(self.shape.num_layers)
        return [array for layer in layers for array in self.pool.rows(layer, slot, first, last)]

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        """Set the request's keys and values from token `first` on."""
        slot = self.pool.open(request)
        length = first
        for array, some in zip(self._of_slot(slot), rows, strict=True):
            length = first + some.shape[1]
            array[:, first:length] = some
        self.pool.wrote(slot, length)

    def _of_slot(self, slot: int) -> Iterator[NDArray[Any]]:
        """Keys and values [heads, tokens, elements] of each layer in turn."""
        for number in range(self.shape.num_layers):
            for array in self.pool.layer(number, slot, 1):
                yield array[0]
