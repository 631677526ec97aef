"""Moves single layers of keys and values, and states, between the pool and a tier.

A request longer than memory is computed alone, layer by layer: the first layers stay, and each of
the others is read while the layer before it computes. A fixed set of resident layers is best,
because layers are used in the same order every time.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.backends.kv_pool import Pool
from edge.errors import RequestError
from edge.offload import KVLayer, KVPlace, KVShape, KVTier

_WINDOW_LAYERS = 2
"""Layers in memory beside the resident ones: one that computes and one that is read."""


@dataclass(slots=True, kw_only=True)
class _Window:
    """The window of layers in memory during a step of a request longer than memory."""

    request: str
    tokens: int
    """Tokens of the request after the step."""
    stays: int
    """Number of resident layers."""
    reads_ahead: bool
    coming: dict[int, Future[None]] = field(default_factory=dict)


class LayerMoves:
    """Tracks which layers of requests with a slot are in memory, and which in the tier alone."""

    def __init__(
        self,
        pool: Pool,
        shape: KVShape,
        tier: KVTier | None,
        windows: KVShape | None,
        room_tokens: int,
    ) -> None:
        """shape, windows: of one request's keys and values in the tier. room_tokens: memory is kept
        for so many tokens."""
        self._pool = pool
        self._shape = shape
        self._windows = windows
        self._layers = range(shape.num_layers)
        self._tier = tier
        self._room_tokens = room_tokens
        self._outside: dict[str, set[int]] = {}
        """Layers that are not in memory, of requests that have a slot."""
        self._window: _Window | None = None
        self._reader: ThreadPoolExecutor | None = None
        self.wait_s = 0.0
        """Seconds that layers waited for moves."""

    def reserve(self, request: str, tokens: int) -> None:
        """Reserve room in the tier for `tokens` of the request. Raises StoreError."""
        self._place(request).reserve(tokens)

    def write_all(self, request: str, slot: int) -> None:
        """Write what the tier lacks of a request."""
        length = self._pool.length(slot)
        for layer in self._layers:
            if layer not in self._outside.get(request, ()):
                self._write(request, layer, length)
        self._write_states(request, slot)

    def arrive(self, request: str, slot: int) -> None:
        """Read the states of a request in the tier that has a slot again; its layers stay there."""
        self._outside[request] = set(self._layers)
        self._read_states(request, slot)

    def read_rest(self, request: str) -> None:
        """Read the request's layers that are not in memory."""
        for layer in sorted(self._outside.pop(request, ())):
            self._read(request, layer)

    def is_outside(self, request: str) -> bool:
        """Whether a layer of a request that has a slot is not in memory."""
        return bool(self._outside.get(request))

    def forget_slot(self, request: str) -> None:
        """Forget which layers are in memory: the request has no slot any more."""
        self._outside.pop(request, None)

    def drop(self, request: str) -> None:
        """Drop what the tier has of the request."""
        if self._tier is not None:
            self._tier.drop(request)
            if not self._pool.can_cut:
                self._tier.drop(_states_of(request))

    def open_window(self, request: str, tokens: int) -> None:
        """Choose the layers that stay for a step after which the request has `tokens`."""
        sizes = [tokens * layer.token_bytes for layer in self._shape.layers]
        room_bytes = self._room_tokens * self._shape.token_bytes
        window_bytes = _WINDOW_LAYERS * max(sizes)
        if max(sizes) > room_bytes:
            raise RequestError(
                f"a single layer of a request of {tokens} tokens is too large: memory is kept for "
                f"{self._room_tokens} tokens in {len(self._layers)} layers"
            )
        self._window = _Window(
            request=request,
            tokens=tokens,
            stays=sum(first + window_bytes <= room_bytes for first in itertools.accumulate(sizes)),
            reads_ahead=window_bytes <= room_bytes,
        )
        length = self._pool.length(self._pool.open(request))
        outside = self._outside.setdefault(request, set())
        for layer in self._layers[self._window.stays :]:
            if layer not in outside:
                self._push_out(request, layer, length)

    def close_window(self) -> None:
        """All layers are in memory in the next step, unless `open_window` follows."""
        self._window = None

    def begin(self, layer: int) -> None:
        """Bring a layer (counted within the shard) into memory before it computes."""
        window = self._window
        if window is None:
            return
        start_s = time.perf_counter()
        outside = self._outside.setdefault(window.request, set())
        if layer in outside:
            coming = window.coming.pop(layer, None)
            if coming is None:
                self._read(window.request, layer)
            else:
                coming.result()
            outside.discard(layer)
        following = next((each for each in self._layers[layer + 1 :] if each in outside), None)
        if following is not None and window.reads_ahead and following not in window.coming:
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="edge-kv-read")
            window.coming[following] = self._reader.submit(self._read, window.request, following)
        self.wait_s += time.perf_counter() - start_s

    def end(self, layer: int) -> None:
        """Write a layer's new tokens to the tier after it was computed, and read the next layer."""
        window = self._window
        if window is not None and layer >= window.stays:
            start_s = time.perf_counter()
            self._push_out(window.request, layer, window.tokens)
            self.wait_s += time.perf_counter() - start_s

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown()

    def _push_out(self, request: str, layer: int, tokens: int) -> None:
        self._write(request, layer, tokens)
        self._pool.drop_layer(layer, self._pool.open(request))
        self._outside.setdefault(request, set()).add(layer)

    def _place(self, request: str) -> KVPlace:
        if self._tier is None:
            raise RequestError("this peer keeps no keys and values on disk; give it --kv-disk")
        return self._tier.place(request, self._shape)

    def _write_states(self, request: str, slot: int) -> None:
        """Replace the request's states and windows in the tier; every token changes all of them."""
        if self._windows is not None and self._tier is not None:
            self._tier.drop(_states_of(request))
            place = self._tier.place(_states_of(request), self._windows)
            for number, (keys, values) in enumerate(self._pool.window_rows(slot)):
                place.append(number, keys, values)
        states = self._pool.states(slot, 1)
        if states and self._tier is not None:
            self._tier.drop(_states_of(request))
            place = self._tier.place(_states_of(request), _states_shape(states))
            for number, state in enumerate(states):
                keys, values = np.resize(state, (2, 1, _half(state), 1))
                place.append(number, keys, values)

    def _read_states(self, request: str, slot: int) -> None:
        if self._windows is not None and self._tier is not None:
            place = self._tier.place(_states_of(request), self._windows)
            for number, (keys, values) in enumerate(self._pool.window_rows(slot)):
                place.read(number, keys, values)
        states = self._pool.states(slot, 1)
        if states and self._tier is not None:
            place = self._tier.place(_states_of(request), _states_shape(states))
            for number, state in enumerate(states):
                both = np.empty((2, 1, _half(state), 1), np.float32)
                place.read(number, *both)
                states[number] = both.reshape(-1)[: state.size].reshape(state.shape)
            self._pool.put_states(slot, states)

    def _write(self, request: str, layer: int, tokens: int) -> None:
        """Write those of a layer's first `tokens` that the tier lacks."""
        place = self._place(request)
        known = place.tokens(layer)
        if known < tokens:
            place.append(layer, *self._pool.rows(layer, self._pool.open(request), known, tokens))

    def _read(self, request: str, layer: int) -> None:
        place = self._place(request)
        tokens = place.tokens(layer)
        with self._pool.filling(layer, self._pool.open(request), tokens) as (keys, values):
            place.read(layer, keys, values)


def _states_of(request: str) -> str:
    """Key of a request's states in a tier. They have their own key because they do not grow."""
    return f"{request} states"


def _states_shape(states: list[NDArray[np.float32]]) -> KVShape:
    """The states as layers of one head: the first half of each as keys, the rest as values."""
    layer = KVLayer(num_kv_heads=1, row_bytes=states[0].itemsize)
    return KVShape(layers=(layer,) * len(states), context_tokens=max(map(_half, states)))


def _half(state: NDArray[np.float32]) -> int:
    return -(-state.size // 2)
