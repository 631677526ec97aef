"""The KV caches of one shard in the host's memory, and access to their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        """beside: shapes of further float32 arrays of each request."""
        caches, states = layout.caches, layout.states
        full = {layer: each for layer, each in caches.items() if each.window_rows is None}
        windows = {layer: each.window_rows for layer, each in caches.items() if layer not in full}
        dtype = cache_row(1, bits)[0]

        def sizes(layer: int) -> tuple[int, int]:
            """Heads, and elements of a row of each."""
            return caches[layer].num_kv_heads, cache_row(caches[layer].head_size, bits)[1]

        def shape(layers: Iterable[int], tokens: int) -> KVShape:
            itemsize = np.dtype(dtype).itemsize
            found = (
                KVLayer(num_kv_heads=count, row_bytes=elements * itemsize)
                for count, elements in map(sizes, layers)
            )
            return KVShape(layers=tuple(found), context_tokens=tokens)

        shapes = [shape for each in states.values() for shape in each.state_shapes]
        shapes += beside
        self.pool = KVPool(
            layers=[sizes(layer) for layer in full],
            slots=limits.caches,
            context_tokens=limits.context_tokens,
            dtype=dtype,
            windows=[(*sizes(layer), rows) for layer, rows in windows.items() if rows is not None],
            states=shapes,
            most_states=limits.requests,
            places=limits.state_places if shapes or windows else 0,
        )
        self.shape = shape(full, limits.context_tokens)
        """The shape of one request's keys and values in a tier."""
        kept = max((rows.kept for rows in windows.values() if rows is not None), default=0)
        self.windows = shape(windows, kept) if windows else None
        """The same of layers that keep the newest tokens only."""
        numbers = {layer: number for number, layer in enumerate(full)}
        of_windows = {layer: number for number, layer in enumerate(windows)}
        owners = {layer: layout.cache_layer(layer) for layer in layout.attentions}
        self.numbers = {
            layer: numbers[owner] for layer, owner in owners.items() if owner in numbers
        }
        """The index of the cache that each layer uses, if it keeps all tokens."""
        self.window_numbers = {
            layer: of_windows[owner] for layer, owner in owners.items() if owner in of_windows
        }
        """The same of layers that keep the newest tokens only."""

    def layer(self, layer: int, first: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values that a layer uses in `count` slots from `first`, as views."""
        if layer in self.numbers:
            return self.pool.layer(self.numbers[layer], first, count)
        return self.pool.window(self.window_numbers[layer], first, count)

    def new_rows(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays for N tokens in every layer, as `put_rows` takes them."""
        return [np.empty_like(array[:, :tokens], order="C") for array in self._of_slot(0)]

    def rows(self, request: str, first: int, last: int) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last), layer by layer; None if the request has fewer
        tokens, or states, or windows."""
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
        """Set the request's keys and values from token `first` on.

        Raises RequestError for layers with states or windows, which are not among the rows.
        """
        if not self.pool.can_cut:
            raise RequestError("these rows do not restore a model with states or windows")
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
