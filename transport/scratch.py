"""Scratch buffers, reused for repeating sizes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MAX_KNOWN_SHAPES = 64
"""Views kept for reuse. A prompt may have any length, so there is a limit."""


class Scratch:
    """Buffers for what the other ranks send. All sizes share the memory."""

    def __init__(self, count: int) -> None:
        self._stores = [np.empty(0, np.uint8) for _ in range(count)]
        self._known: dict[tuple[int, np.dtype[Any]], list[Array]] = {}

    def take(self, size: int, dtype: np.dtype[Any]) -> list[Array]:
        """The buffers, flat, each of ``size`` items of ``dtype``; valid until the next call."""
        key = (size, dtype)
        buffers = self._known.get(key)
        if buffers is None:
            buffers = self._known[key] = self._make(size * dtype.itemsize, dtype)
        return buffers

    def _make(self, nbytes: int, dtype: np.dtype[Any]) -> list[Array]:
        if nbytes > self._stores[0].nbytes:
            self._stores = [np.empty(nbytes, np.uint8) for _ in self._stores]
            self._known.clear()  # They are views of the freed memory.
        elif len(self._known) >= _MAX_KNOWN_SHAPES:
            self._known.clear()
        return [store[:nbytes].view(dtype) for store in self._stores]
