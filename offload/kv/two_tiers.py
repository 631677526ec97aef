"""Two tiers as one: requests go to the first while it has room, and then to the second.

Requests take turns in a cycle, so a fixed set in the first tier is best, as for weights
(`weight_streamer.py`). No request moves to make room for a later one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edge.offload.errors import StoreFullError
from edge.offload.kv.tier import KVPlace, KVShape, KVTier, Rows


class KVTiers:
    """See KVTier. Owns both tiers, and closes them."""

    def __init__(self, first: KVTier, second: KVTier) -> None:
        self.first = first
        self.second = second
        self._places: dict[str, _Place] = {}
        self._moved_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self.first.used_bytes + self.second.used_bytes

    @property
    def written_bytes(self) -> int:
        return self.first.written_bytes + self.second.written_bytes - self._moved_bytes

    def place(self, request: str, shape: KVShape) -> KVPlace:
        if request not in self._places:
            self._places[request] = _Place(self, request, shape)
        return self._places[request]

    def drop(self, request: str) -> None:
        if self._places.pop(request, None) is not None:
            self.first.drop(request)
            self.second.drop(request)

    def close(self) -> None:
        self._places.clear()
        self.first.close()
        self.second.close()

    def move(self, request: str, shape: KVShape, dtype: np.dtype[Any]) -> KVPlace:
        """Move a request to the second tier. dtype: of the rows.

        Raises StoreFullError; the request then stays.
        """
        source, target = self.first.place(request, shape), self.second.place(request, shape)
        try:
            for layer, each in enumerate(shape.layers):
                size = (each.num_kv_heads, source.tokens(layer), each.row_bytes // dtype.itemsize)
                keys, values = (np.empty(size, dtype) for _ in range(2))
                source.read(layer, keys, values)
                target.append(layer, keys, values)
                self._moved_bytes += keys.nbytes + values.nbytes
        except BaseException:
            self.second.drop(request)
            raise
        self.first.drop(request)
        return target


class _Place:
    def __init__(self, tiers: KVTiers, request: str, shape: KVShape) -> None:
        self._tiers = tiers
        self._request = request
        self._shape = shape
        self._now = tiers.first.place(request, shape)
        self._is_first = True
        self._dtype: np.dtype[Any] = np.dtype(np.uint8)
        """Type of the stored rows."""

    def tokens(self, layer: int) -> int:
        return self._now.tokens(layer)

    def reserve(self, tokens: int) -> None:
        if self._is_first:
            try:
                self._now.reserve(tokens)
                return
            except StoreFullError:
                self._leave(self._dtype)
        self._now.reserve(tokens)

    def append(self, layer: int, keys: Rows, values: Rows) -> None:
        if self._is_first:
            try:
                self._now.append(layer, keys, values)
                self._dtype = keys.dtype
                return
            except StoreFullError:
                self._leave(keys.dtype)
        self._now.append(layer, keys, values)

    def read(self, layer: int, keys: Rows, values: Rows) -> None:
        self._now.read(layer, keys, values)

    def _leave(self, dtype: np.dtype[Any]) -> None:
        self._now = self._tiers.move(self._request, self._shape, dtype)
        self._is_first = False
