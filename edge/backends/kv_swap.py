"""Swaps requests between the pool and a tier, takes prefixes of them, and saves their states.

A swapped-out request leaves its slot and gets one again at its next step. One longer than memory is
computed alone, layer by layer (`kv_layer_moves.py`).

States, and layers that keep the newest tokens only (windows), are swapped with whole requests. A
state covers all tokens so far, so another request with the same beginning starts from a saved copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edge.backends.kv_layer_moves import LayerMoves
from edge.backends.kv_pool import Pool
from edge.errors import RequestError
from edge.offload import KVShape, KVTier
from edge.protocol.step import Step, StepEntry, StepLimits


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
        self._has_tier = tier is not None
        self._room_tokens = limits.cached_tokens
        self._layers = LayerMoves(pool, shape, tier, windows, limits.cached_tokens)
        windows_bytes = limits.windows * pool.window_bytes_of()
        self._room_bytes = limits.cached_tokens * token_bytes + windows_bytes
        self._away: dict[str, int] = {}
        """Requests without a slot, and their tokens."""
        self._saved: dict[int, tuple[str, int]] = {}
        """The request, and the number of its tokens, of the state in each place."""
        self._before_guesses = limits.saved_states
        """The place for the state before a step with guesses."""
        self._arrival_s = 0.0
        """Seconds that steps waited before their first layer."""

    @property
    def wait_s(self) -> float:
        """Seconds that steps waited for moves."""
        return self._arrival_s + self._layers.wait_s

    def swap_out(self, request: str) -> None:
        """Move a request to the tier and free its slot. On StoreError nothing has moved."""
        if request in self._away or request not in self._pool:
            return
        slot = self._pool.open(request)
        length = self._pool.length(slot)
        self._layers.write_all(request, slot)
        self._pool.release(request)
        self._layers.forget_slot(request)
        self._away[request] = length

    def reserve(self, request: str, tokens: int) -> None:
        """Reserve room in the tier for `tokens` of the request. Raises StoreError."""
        self._layers.reserve(request, tokens)

    def keep(self, request: str, tokens: int) -> None:
        """End the request; its first N tokens stay in memory if they are there, and if its state
        at N, should it have states, was saved."""
        self._layers.drop(request)
        is_here = request in self._pool and not self._layers.is_outside(request)
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
        for layer in range(self._shape.num_layers):
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
        return request not in self._away and not self._layers.is_outside(request)

    def drop(self, request: str) -> None:
        """Drop the request's keys and values in the tier, and its saved states."""
        for place in self._saved_of(request):
            del self._saved[place]
            self._pool.drop_saved(place)
        self._away.pop(request, None)
        self._layers.forget_slot(request)
        self._layers.drop(request)

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
        is_alone = step.batch == 1 and not others and self._has_tier
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
                self._layers.arrive(request, slot)
            if tokens <= self._room_tokens:
                self._layers.read_rest(request)
        if step.drafted and self._pool.rewinds:
            self._save_before_guesses(step.entries[0])
        self._layers.close_window()
        if tokens > self._room_tokens and self._shape.num_layers:
            self._layers.open_window(requests[0], tokens)
        self._arrival_s += time.perf_counter() - start_s

    def _new_window_bytes(self, entry: StepEntry) -> int:
        """Bytes of the request's windows after a step, over those before it."""
        grown = self._pool.window_bytes_of(entry.end)
        if entry.request in self._pool:
            length = self._pool.length(self._pool.open(entry.request))
            grown -= self._pool.window_bytes_of(length)
        return grown

    def begin(self, layer: int) -> None:
        """Bring a layer (counted within the shard) into memory before it computes."""
        self._layers.begin(layer)

    def end(self, layer: int) -> None:
        """Write a layer's new tokens to the tier after it was computed, if it does not stay."""
        self._layers.end(layer)

    def close(self) -> None:
        self._layers.close()

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


def _not_at(position: int, tokens: int) -> RequestError:
    return RequestError(
        f"a request continues at token {position}, but its state is at {tokens}",
        remedy="compute it from its first token",
    )


def _too_many(error: KeyError) -> RequestError:
    return RequestError(f"too many requests at once: {error.args[0]}")
