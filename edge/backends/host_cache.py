"""The KV caches of one shard in the host's memory, and a prompt's rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
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
        """beside: shapes of further arrays of each request, float32, of a fixed size."""
        caches, states = layout.caches, layout.states
        rows = [cache_row(each.head_size, bits) for each in caches.values()]
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
            places=limits.saved_states if shapes else 0,
        )
        self.shape = KVShape(
            layers=tuple(
                KVLayer(num_kv_heads=count, row_bytes=elements * np.dtype(dtype).itemsize)
                for count, (_, elements) in zip(heads, rows, strict=True)
            ),
            context_tokens=limits.context_tokens,
        )
        """What a tier must keep of one request."""
        numbers = {layer: number for number, layer in enumerate(caches)}
        self.numbers = {layer: numbers[layout.cache_layer(layer)] for layer in layout.attentions}
        """For each layer that uses a cache: which one it is, as caches are counted here."""

    def new_rows(self, tokens: int) -> list[NDArray[Any]]:
        """Memory for N tokens in every layer, as `put_rows` takes it."""
        return [np.empty_like(array[:, :tokens], order="C") for array in self._of_slot(0)]

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last), layer by layer; None if there are fewer, or
        states as well."""
        if (
            not self.pool.can_cut
            or request not in self.pool
            or self.pool.length(self.pool.open(request)) < last
        ):
            return None
        slot = self.pool.open(request)
        layers = range(self.shape.num_layers)
        return [array for layer in layers for array in self.pool.rows(layer, slot, first, last)]

    def put_rows(self, request: str, first: int, rows: Sequence[NDArray[Any]]) -> None:
        """Let the request have these from token `first` on.

        Raises RequestError where it would need states as well.
        """
        if not self.pool.can_cut:
            raise RequestError("keys and values of a model whose layers have states besides")
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
