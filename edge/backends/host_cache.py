"""The KV caches of one shard in the host's memory, and access to their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        found = {layer: each.window_rows for layer, each in caches.items()}
        windows = {layer: rows for layer, rows in found.items() if rows is not None}
        full = [layer for layer in caches if layer not in windows]
        self._caches = tuple(caches)
        self._windows = windows
        dtype = cache_row(1, bits)[0]

        def sizes(layer: int) -> tuple[int, int]:
            """Heads, and elements of a row of each."""
            return caches[layer].num_kv_heads, cache_row(caches[layer].cached_size, bits)[1]

        def shape(layers: Iterable[int], tokens: int) -> KVShape:
            itemsize = np.dtype(dtype).itemsize
            layers_of = (
                KVLayer(num_kv_heads=count, row_bytes=elements * itemsize)
                for count, elements in map(sizes, layers)
            )
            return KVShape(layers=tuple(layers_of), context_tokens=tokens)

        shapes = [shape for each in states.values() for shape in each.state_shapes]
        shapes += beside
        self.pool = KVPool(
            layers=[sizes(layer) for layer in full],
            slots=limits.caches,
            context_tokens=limits.context_tokens,
            dtype=dtype,
            windows=[(*sizes(layer), rows) for layer, rows in windows.items()],
            states=shapes,
            most_states=limits.requests,
            places=limits.state_places if shapes or windows else 0,
        )
        self.shape = shape(full, limits.context_tokens)
        """The shape of one request's keys and values in a tier."""
        kept = max((rows.kept for rows in windows.values()), default=0)
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

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        """Arrays for N tokens in every layer, as `put_rows` takes them."""
        return [
            np.empty_like(array[0], shape=(array.shape[1], tokens, array.shape[3]))
            for layer in self._layers(windows)
            for array in self.layer(layer, 0, 1)
        ]

    def _layers(self, windows: bool) -> list[int]:
        return [layer for layer in self._caches if windows or layer not in self._windows]

    def rows(
        self, request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        """Keys and values of tokens [first, last), layer by layer; None if not all are there."""
        pool = self.pool
        if request not in pool:
            return None
        slot = pool.open(request)
        length = pool.length(slot)
        layers = self._layers(windows)
        begins = {
            layer: rows.first(length) for layer, rows in self._windows.items() if layer in layers
        }
        if length < last or first < max(begins.values(), default=0):
            return None
        return [
            array[0, :, first - begins.get(layer, 0) : last - begins.get(layer, 0)]
            for layer in layers
            for array in self.layer(layer, slot, 1)
        ]

    def put_rows(
        self, request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        """Set the request's keys and values from token `first` on. If layers keep the newest tokens
        only, it has the tokens before that."""
        slot, layers = self.pool.open(request), self._layers(windows)
        length, added = first, iter(rows)
        for layer in layers:
            for array in self.layer(layer, slot, 1):
                some = next(added)
                length = first + some.shape[1]
                window = self._windows.get(layer)
                if window is None:
                    array[0, :, first:length] = some
                else:
                    both = np.concatenate([array[0, :, : window.rows(first)], some], axis=1)
                    count = window.rows(length)
                    array[0, :, :count] = both[:, both.shape[1] - count :]
        if layers:  # else `first` may be before what the request has
            self.pool.wrote(slot, length)
