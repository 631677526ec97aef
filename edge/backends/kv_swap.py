"""Swaps keys and values between the pool and a tier: whole requests, or layers within a step.

A swapped-out request leaves its slot and gets one again at its next step. A request longer than
memory is computed alone, layer by layer: the first layers stay, and each of the others is read
while the layer before it computes. A fixed set of resident layers is best, because layers are used
in the same order every time.

States, and layers that keep the newest tokens only (windows), are swapped with whole requests. A
state covers all tokens so far, so another request with the same beginning starts from a saved copy.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.offload import KVLayer, KVPlace, KVShape, KVTier
from edge.protocol.step import Step, StepEntry, StepLimits

_WINDOW_LAYERS = 2
"""Layers in memory beside the resident ones: one that computes and one that is read."""


Rows = NDArray[Any]
"""[num_kv_heads, tokens, elements] of one layer's keys or values."""


class Pool(Protocol):
    """The memory in which graphs and kernels use keys and values, by request and slot."""

    @property
    def num_requests(self) -> int: ...

    @property
    def can_cut(self) -> bool:
        """Whether a request can be cut to its first tokens, because it has neither states nor
        windows."""
        ...

    @property
    def rewinds(self) -> bool:
        """Whether there are states, which no guess may be written over."""
        ...

    def can_cut_to(self, slot: int, tokens: int) -> bool:
        """Whether the slot's request can go on after its first `tokens`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        ...

    def __contains__(self, request: str) -> bool: ...

    def open(self, request: str) -> int:
        """The request's slot, a new one if it has none. Raises KeyError if all are taken."""
        ...

    def length(self, slot: int) -> int: ...

    def states(self, first: int, count: int) -> list[NDArray[np.float32]]:
        """States of `count` slots from `first`; empty if the layers have no states."""
        ...

    def put_states(self, slot: int, states: Sequence[NDArray[np.float32]]) -> None:
        """Set a slot's states, in the form of `states` for one slot."""
        ...

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows, of requests and saved ones."""
        ...

    def window_bytes_of(self, tokens: int | None = None) -> int:
        """Bytes of one request's windows after so many tokens; None: at most."""
        ...

    def window_rows(self, slot: int) -> list[tuple[Rows, Rows]]:
        """Keys and values of each window, to read or to write; they follow from the slot's
        length."""
        ...

    def windows_like(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays of the shapes of one request's windows after so many tokens, as `saved_states` has
        them, without memory."""
        ...

    def save_states(self, slot: int, place: int) -> None:
        """Copy a slot's states and windows to a place for saved ones, over its contents."""
        ...

    def saved_states(self, place: int) -> list[NDArray[Any]]:
        """The states in a place, in the form of `states` for one slot, then keys and values of each
        window; valid until the next call."""
        ...

    def new_states(self) -> list[NDArray[Any]]:
        """Arrays for the states of one request, in the form of `states` for one slot."""
        ...

    def load_states(self, slot: int, place: int) -> None:
        """Copy the saved states and windows of a place to a slot, and forget tokens behind them.
        Raises KeyError if no memory for states is free."""
        ...

    def drop_states(self, slot: int) -> None:
        """Free the memory of a slot's states and windows until they are set again."""
        ...

    def drop_saved(self, place: int) -> None:
        """Free the memory of a place for saved states."""
        ...

    def wrote(self, slot: int, length: int) -> None: ...

    def shrink(self, slot: int, length: int) -> None:
        """Forget tokens after the first `length`."""
        ...

    def rename(self, request: str, to: str) -> None:
        """Give the slot of `request` to request `to`, which has none."""
        ...

    def rows(self, index: int, slot: int, first: int, last: int) -> tuple[Rows, Rows]:
        """Keys and values of a layer's tokens [first, last), valid until the next call."""
        ...

    def filling(
        self, index: int, slot: int, tokens: int
    ) -> AbstractContextManager[tuple[Rows, Rows]]:
        """Buffers for a layer's first `tokens` tokens. Their contents are in the pool when the
        context ends."""
        ...

    def release(self, request: str) -> None: ...

    def drop_layer(self, index: int, slot: int) -> None:
        """Free the memory of a slot's layer. Called only for requests that may be longer than
        memory."""
        ...


class WithoutWindows(ABC):
    """The part of a Pool about windows, of pools that have none."""

    @property
    @abstractmethod
    def can_cut(self) -> bool: ...

    @property
    def rewinds(self) -> bool:
        return not self.can_cut

    @property
    def window_bytes(self) -> int:
        return 0

    @abstractmethod
    def length(self, slot: int) -> int: ...

    def can_cut_to(self, slot: int, tokens: int) -> bool:
        length = self.length(slot)
        return tokens <= length if self.can_cut else tokens == length

    def window_bytes_of(self, tokens: int | None = None) -> int:
        return 0

    def window_rows(self, slot: int) -> list[tuple[Rows, Rows]]:
        return []

    def windows_like(self, tokens: int) -> list[NDArray[Any]]:
        return []

    def drop_saved(self, place: int) -> None:
        """Does nothing: places keep their memory."""
        return


class CacheMoves:
    """Tracks a shard's KV cache in its pool and its tier. Used by the compute thread."""

    def __init__(
        self,
        pool: Pool,
        shape: KVShape,
        tier: KVTier | None,
        limits: StepLimits,
        windows: KVShape | None = None,
        *,
        token_bytes: int = 0,
    ) -> None:
        """shape, windows: of one request's keys and values in the tier; windows: of layers that
        keep the newest tokens only. token_bytes: with windows, the memory for each of the limits'
        `cached_tokens`."""
        self._pool = pool
        self._shape = shape
        self._windows = windows
        self._layers = range(shape.num_layers)
        self._tier = tier
        self._room_tokens = limits.cached_tokens
        windows_bytes = limits.windows * pool.window_bytes_of()
        self._room_bytes = limits.cached_tokens * token_bytes + windows_bytes
        self._away: dict[str, int] = {}
        """Requests without a slot, and their tokens."""
        self._outside: dict[str, set[int]] = {}
        """Layers that are not in memory, of requests that have a slot."""
        self._saved: dict[int, tuple[str, int]] = {}
        """The request, and the number of its tokens, of the state in each place."""
        self._before_guesses = limits.saved_states
        """The place for the state before a step with guesses."""
        self._window: _Window | None = None
        self._reader: ThreadPoolExecutor | None = None
        self.wait_s = 0.0
        """Seconds that steps waited for moves."""

    def swap_out(self, request: str) -> None:
        """Move a request to the tier and free its slot. On StoreError nothing has moved."""
        if request in self._away or request not in self._pool:
            return
        slot = self._pool.open(request)
        length = self._pool.length(slot)
        for layer in self._layers:
            if layer not in self._outside.get(request, ()):
                self._write(request, layer, length)
        self._write_states(request, slot)
        self._pool.release(request)
        self._outside.pop(request, None)
        self._away[request] = length

    def reserve(self, request: str, tokens: int) -> None:
        """Reserve room in the tier for `tokens` of the request. Raises StoreError."""
        self._place(request).reserve(tokens)

    def keep(self, request: str, tokens: int) -> None:
        """End the request; its first N tokens stay in memory if they are there, and if its state
        at N, should it have states, was saved."""
        self._drop_from_tier(request)
        is_here = request in self._pool and not self._outside.get(request)
        if is_here and self._has_first(request, tokens):
            slot = self._pool.open(request)
            if not self._pool.can_cut:
                self._pool.drop_states(slot)
            self._pool.shrink(slot, tokens)
        else:
            self._pool.release(request)
            self.drop(request)

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        """Begin a request with the first N tokens of `source`. Returns N, or 0 if that fails.

        moves: `source` is gone afterwards, also if that fails. Raises RequestError if every slot is
        taken.
        """
        found = self._taken(request, source, tokens, moves=moves)
        if moves and not found and request != source:
            self._pool.release(source)
            self.drop(source)
        return found

    def _taken(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        has = source in self._pool and self.is_inside(source)
        if not has or request in self._pool or request in self._away:
            return 0
        if not self._has_first(source, tokens):
            return 0
        slot, place = self._pool.open(source), self._place_of(source, tokens)
        if moves:
            if not self._make_room(0, self._pool.window_bytes_of(tokens), spared=place):
                return 0
            self._load_states(slot, place)
            saved = {each: of for each, of in self._saved_of(source).items() if of <= tokens}
            for each in saved:
                del self._saved[each]
            self.drop(source)
            self._pool.rename(source, request)
            self._pool.shrink(slot, tokens)
            self._saved |= {each: (request, of) for each, of in saved.items()}
            return tokens
        if self._pool.num_tokens + tokens > self._room_tokens:
            return 0
        if not self._make_room(tokens, self._pool.window_bytes_of(tokens), spared=place):
            return 0
        target = self._open(request)
        slot = self._pool.open(source)
        self._load_states(target, place)
        for layer in self._layers:
            rows = self._pool.rows(layer, slot, 0, tokens)
            with self._pool.filling(layer, target, tokens) as into:
                for array, some in zip(into, rows, strict=True):
                    array[...] = some
        self._pool.wrote(target, tokens)
        return tokens

    def cut(self, request: str, tokens: int) -> None:
        """Forget a request's tokens after the first N, the tokens before its last step with
        guesses if it has states."""
        if request not in self._pool:
            return
        slot = self._pool.open(request)
        if self._pool.rewinds:
            if self._saved.get(self._before_guesses) != (request, tokens):
                raise RequestError(f"the state at {tokens} tokens is not saved")
            self._pool.load_states(slot, self._before_guesses)
        elif tokens < self._pool.length(slot):
            self._check_cut(slot, tokens)
        self._pool.shrink(slot, tokens)

    def save_state(self, request: str, tokens: int, place: int) -> None:
        """Save the state of a request, if it has `tokens` tokens now, for requests with the same
        prefix. The place's former state is lost in any case."""
        self._saved.pop(place, None)
        if request in self._pool:
            slot = self._pool.open(request)
            has_room = self._make_room(0, self._pool.window_bytes_of(tokens))
            if self._pool.length(slot) == tokens and has_room:
                self._pool.save_states(slot, place)
                self._saved[place] = (request, tokens)
        if place not in self._saved:
            self._pool.drop_saved(place)

    def make_room(self, request: str, tokens: int) -> bool:
        """Whether there is memory for the first N tokens of a request; see `_make_room`."""
        has = self._pool.length(self._pool.open(request)) if request in self._pool else 0
        windows = self._pool.window_bytes_of(tokens) - self._pool.window_bytes_of(has)
        return self._make_room(max(0, tokens - has), windows)

    def _make_room(self, tokens: int, window_bytes: int, *, spared: int | None = None) -> bool:
        """Whether there is memory for so many more tokens, and bytes of windows. Saved windows have
        memory that is free otherwise: the oldest are dropped, but not the one in place `spared`."""
        if self._windows is None:
            return True
        wanted = (self._pool.num_tokens + tokens) * self._shape.token_bytes + window_bytes
        for place in list(self._saved):
            if wanted + self._pool.window_bytes <= self._room_bytes:
                break
            if place != spared:
                del self._saved[place]
                self._pool.drop_saved(place)
        return wanted + self._pool.window_bytes <= self._room_bytes

    def saved(self, request: str) -> list[int]:
        """The numbers of tokens at which states of the request were saved for other requests."""
        saved = self._saved_of(request).items()
        return sorted(tokens for place, tokens in saved if place != self._before_guesses)

    def states(self, request: str, tokens: int) -> list[NDArray[Any]] | None:
        """The request's states at N tokens, if they were saved."""
        place = self._place_of(request, tokens)
        return None if place is None else self._pool.saved_states(place)

    def states_like(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays of the shapes and types of a request's states and windows at N tokens."""
        return [*self._pool.new_states(), *self._pool.windows_like(tokens)]

    def new_states(self, request: str, tokens: int) -> list[NDArray[Any]]:
        """Arrays for the request's states and windows at N tokens; those of windows are its own."""
        if self._windows is None:
            return self._pool.new_states()
        self.make_room(request, tokens)
        slot = self._open(request)
        self._pool.wrote(slot, tokens)
        return [rows[None] for pair in self._pool.window_rows(slot) for rows in pair]

    def put_states(self, request: str, tokens: int, states: Sequence[NDArray[Any]]) -> None:
        """Set a request's states, which are those at N tokens, in arrays of `new_states`."""
        slot = self._open(request)
        if self._pool.rewinds:
            self._pool.put_states(slot, states)
        self._pool.wrote(slot, tokens)

    def _save_before_guesses(self, entry: StepEntry) -> None:
        begun = (entry.request, entry.position)
        if self._saved.get(self._before_guesses) != begun:
            self.save_state(*begun, self._before_guesses)

    def _has_first(self, request: str, tokens: int) -> bool:
        """Whether the request has its first `tokens`, and their state if there are states."""
        has = self._pool.length(self._pool.open(request)) >= tokens
        return has and (self._pool.can_cut or self._place_of(request, tokens) is not None)

    def _place_of(self, request: str, tokens: int) -> int | None:
        """The place where the request's state at `tokens` tokens is saved."""
        found = (place for place, of in self._saved.items() if of == (request, tokens))
        return next(found, None)

    def _saved_of(self, request: str) -> dict[int, int]:
        """The request's saved states: number of tokens by place."""
        return {place: tokens for place, (whose, tokens) in self._saved.items() if whose == request}

    def clear(self) -> None:
        """Forget every request. Called only without a tier."""
        self._saved.clear()

    def is_inside(self, request: str) -> bool:
        """Whether all of the request is in memory."""
        return request not in self._away and not self._outside.get(request)

    def drop(self, request: str) -> None:
        """Drop the request's keys and values in the tier, and its saved states."""
        for place in self._saved_of(request):
            del self._saved[place]
            self._pool.drop_saved(place)
        self._away.pop(request, None)
        self._outside.pop(request, None)
        self._drop_from_tier(request)

    def arrive(self, step: Step) -> None:
        """Give the step's requests slots and swap them in.

        Raises RequestError for more tokens than memory is kept for, or more requests than slots.
        """
        requests = [entry.request for entry in step.entries]
        if not self._pool.can_cut:
            for entry in step.entries:
                if not entry.position and entry.request in self._pool:
                    self._pool.release(entry.request)  # other shards had none of its prefix
            self._check_order(step)
        kept: dict[int, int] = {}
        """Tokens before the step, by slot: other shards may have had less of a prefix."""
        tokens = self._pool.num_tokens + sum(len(entry.tokens) for entry in step.entries)
        for entry in step.entries:
            if entry.request in self._pool:
                slot = self._pool.open(entry.request)
                length = self._pool.length(slot)
                kept[slot] = min(entry.position, length)
                tokens -= length - kept[slot]
        tokens += sum(self._away.get(request, 0) for request in requests)
        others = self._pool.num_requests - sum(request in self._pool for request in requests)
        is_alone = step.batch == 1 and not others and self._tier is not None
        new_bytes = sum(self._new_window_bytes(entry) for entry in step.entries)
        has_room = self._make_room(tokens - self._pool.num_tokens, new_bytes)
        if (tokens > self._room_tokens or not has_room) and not is_alone:
            raise RequestError(
                f"{tokens} tokens under way", remedy=f"memory is kept for {self._room_tokens}"
            )
        for slot, length in kept.items():
            self._pool.wrote(slot, length)
        start_s = time.perf_counter()
        for request in requests:
            slot = self._open(request)
            if request in self._away:
                self._pool.wrote(slot, self._away.pop(request))
                self._outside[request] = set(self._layers)
                self._read_states(request, slot)
            if tokens <= self._room_tokens:
                for layer in sorted(self._outside.pop(request, ())):
                    self._read(request, layer)
        if step.drafted and self._pool.rewinds:
            self._save_before_guesses(step.entries[0])
        self._window = None
        if tokens > self._room_tokens and self._layers:
            self._open_window(requests[0], tokens)
        self.wait_s += time.perf_counter() - start_s

    def _new_window_bytes(self, entry: StepEntry) -> int:
        """Bytes of the request's windows after a step, over those before it."""
        grown = self._pool.window_bytes_of(entry.end)
        if entry.request in self._pool:
            length = self._pool.length(self._pool.open(entry.request))
            grown -= self._pool.window_bytes_of(length)
        return grown

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

    def _check_order(self, step: Step) -> None:
        """Raises RequestError for a step that does not continue a request's state."""
        for entry in step.entries:
            if entry.request in self._pool:
                self._check_cut(self._pool.open(entry.request), entry.position)
            elif entry.position != (tokens := self._away.get(entry.request, 0)):
                raise _not_at(entry.position, tokens)

    def _check_cut(self, slot: int, tokens: int) -> None:
        """Raises RequestError if the slot's request cannot go on after its first `tokens`."""
        if not self._pool.can_cut_to(slot, tokens):
            raise _not_at(tokens, self._pool.length(slot))

    def _open_window(self, request: str, tokens: int) -> None:
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

    def _push_out(self, request: str, layer: int, tokens: int) -> None:
        self._write(request, layer, tokens)
        self._pool.drop_layer(layer, self._pool.open(request))
        self._outside.setdefault(request, set()).add(layer)

    def _open(self, request: str) -> int:
        try:
            return self._pool.open(request)
        except KeyError as error:
            raise _too_many(error) from error

    def _load_states(self, slot: int, place: int | None) -> None:
        """Load the states of a place, if there is one, into a slot."""
        try:
            if place is not None and not self._pool.can_cut:
                self._pool.load_states(slot, place)
        except KeyError as error:
            raise _too_many(error) from error

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

    def _drop_from_tier(self, request: str) -> None:
        if self._tier is not None:
            self._tier.drop(request)
            if not self._pool.can_cut:
                self._tier.drop(_states_of(request))

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


def _not_at(position: int, tokens: int) -> RequestError:
    return RequestError(
        f"a request continues at token {position}, but its state is at {tokens}",
        remedy="compute it from its first token",
    )


def _too_many(error: KeyError) -> RequestError:
    return RequestError(f"too many requests at once: {error.args[0]}")


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


def _states_of(request: str) -> str:
    """Key of a request's states in a tier. They have their own key because they do not grow."""
    return f"{request} states"


def _states_shape(states: list[NDArray[np.float32]]) -> KVShape:
    """The states as layers of one head: the first half of each as keys, the rest as values."""
    layer = KVLayer(num_kv_heads=1, row_bytes=states[0].itemsize)
    return KVShape(layers=(layer,) * len(states), context_tokens=max(map(_half, states)))


def _half(state: NDArray[np.float32]) -> int:
    return -(-state.size // 2)
