"""KV caches of several requests side by side, in memory that is committed when it is written.

Each request has a slot, and slots are packed without holes, so that neighbouring requests are one
contiguous array and a batch needs no copy. Address space is reserved for the longest context of
every slot. The system commits pages as tokens reach them, and a released slot frees them. (After
vAttention: contiguous in virtual memory, committed on demand. Prabhu et al., 2024.)
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.kv.slot_order import SlotOrder
from edge.offload.kv.window_rows import WindowRows
from edge.system.pages import HUGE_PAGE_BYTES, advise, private_memory

_PIECE_TOKENS = 256
"""Tokens that are copied at once when two requests swap slots."""


class KVPool:
    """Keys and values [slots, num_kv_heads, context_tokens, elements] for each layer.

    Windows are layers that keep the newest tokens only, [slots, num_kv_heads, kept, elements].
    States are arrays of a fixed size for each request, zeros at first. A state covers all tokens of
    its request, so a request with states cannot be cut; with windows it can be cut only where
    `can_cut_to` says so. Saved copies of both are in separate places, and a slot may lack them.
    Not thread-safe: used from the compute thread.
    """

    def __init__(
        self,
        *,
        layers: Sequence[tuple[int, int]],
        slots: int,
        context_tokens: int,
        dtype: type[np.generic] = np.float32,
        windows: Sequence[tuple[int, int, WindowRows]] = (),
        states: Sequence[tuple[int, ...]] = (),
        most_states: int | None = None,
        places: int = 0,
    ) -> None:
        """Reserve address space for these slots and a spare one. Raises MemoryError if the system
        refuses.

        layers: (num_kv_heads, elements of a token's key or value of a head) of each. windows: the
        same of layers with a sliding window, and their rows. states: shapes of one request's
        float32 states. most_states: most slots with states; None: all. places: for saved copies.
        """
        kind = np.dtype(dtype)
        shapes = [(slots + 1, heads, context_tokens, elements) for heads, elements in layers]
        shapes += [
            (slots + 1 + places, heads, rows.kept, elements) for heads, elements, rows in windows
        ]
        of_states = [(slots + 1 + places, *shape) for shape in states]
        try:
            self._tokens = _Pages(sum(2 * math.prod(shape) * kind.itemsize for shape in shapes))
            self._fixed = _Pages(sum(map(_page_bytes, of_states)))
        except OSError as error:
            raise MemoryError(
                f"no address space for {slots} KV caches of {context_tokens} tokens"
            ) from error
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = []
        begin = 0
        for shape in shapes:
            size = 2 * math.prod(shape)
            keys, values = self._tokens.array(begin, (2, *shape), kind)
            pairs.append((keys, values))
            begin += size * kind.itemsize
        self._arrays = pairs[: len(layers)]
        self._windows = [
            (pair, rows) for pair, (*_, rows) in zip(pairs[len(layers) :], windows, strict=True)
        ]
        """Keys and values of windows: of slots first, then of places."""
        begin, found = 0, {}
        for number in sorted(
            range(len(of_states)), key=lambda number: -_page_of(of_states[number])
        ):
            # Aligned to pages, which the states of real models fill, so that all can be freed.
            rows = of_states[number]
            found[number] = self._fixed.array(begin, rows, np.dtype(np.float32))
            if _page_of(rows) == HUGE_PAGE_BYTES:
                self._fixed.prefer_huge(begin, _page_bytes(rows))
            begin += _page_bytes(rows)
        self._states: list[NDArray[np.float32]] = [found[number] for number in range(len(found))]
        """Arrays of states: of slots first, then of places."""
        self._slots = slots
        self._places = places
        self._most_states = slots if most_states is None else most_states
        self._requests = SlotOrder()
        self._lengths: list[int] = []
        self._with_state: list[bool] = []
        """Whether each used slot has states and windows."""
        self._saved_lengths: dict[int, int] = {}
        """Tokens of the copy in each place."""
        self._spare: int | None = None
        """The slot that may have pages without a request."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self._lengths)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    @property
    def slots(self) -> Iterator[tuple[int, str]]:
        """Used slots with their requests."""
        return enumerate(self._requests)

    def length(self, slot: int) -> int:
        """Number of tokens in the slot."""
        return self._lengths[slot]

    def open(self, request: str) -> int:
        """The request's slot, a new one at the end if it has none.

        Raises KeyError if all slots or all states are taken.
        """
        if request in self._requests:
            return self._requests.slot(request)
        if len(self._requests) == self._slots:
            raise KeyError(f"all {self._slots} KV slots are taken")
        self._check_states()
        slot = self._requests.open(request)
        self._lengths.append(0)
        self._with_state.append(True)
        for state in self.states(slot, 1):
            state.fill(0)
        return slot

    def wrote(self, slot: int, length: int) -> None:
        """Record that the slot has `length` tokens, which move when slots are packed. Fewer than
        before: `can_cut_to` says that this is possible."""
        old = self._lengths[slot]
        self._lengths[slot] = length
        if length < old and self._with_state[slot]:
            for pair, rows in self._windows:
                moved = rows.first(old) - rows.first(length)
                count = length - rows.first(old)
                for array in pair if moved else ():
                    array[slot, :, moved : moved + count] = array[slot, :, :count].copy()

    @property
    def can_cut(self) -> bool:
        """Whether a request can be cut to its first tokens, because it has neither states nor
        windows."""
        return not self._states and not self._windows

    @property
    def rewinds(self) -> bool:
        """Whether there are states, which no guess may be written over."""
        return bool(self._states)

    def can_cut_to(self, slot: int, tokens: int) -> bool:
        """Whether the slot's request can go on after its first `tokens`."""
        length = self._lengths[slot]
        if self._states:
            return tokens == length
        return tokens <= length and all(rows.can_cut(length, tokens) for _, rows in self._windows)

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows, of requests and saved ones."""
        used = zip(self._lengths, self._with_state, strict=True)
        lengths = [length for length, has_state in used if has_state]
        return sum(map(self.window_bytes_of, (*lengths, *self._saved_lengths.values())))

    def window_bytes_of(self, tokens: int | None = None) -> int:
        """Bytes of one request's windows after so many tokens; None: at most."""
        return sum(
            (rows.kept if tokens is None else rows.rows(tokens)) * array[0, :, 0].nbytes
            for pair, rows in self._windows
            for array in pair
        )

    def window(self, index: int, first: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(keys, values) of a layer with a window in `count` slots from `first`, as views."""
        keys, values = self._windows[index][0]
        return keys[first : first + count], values[first : first + count]

    def window_rows(self, slot: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """(keys, values) [num_kv_heads, rows in use, elements] of each window, as views."""
        length = self._lengths[slot]
        return [
            (keys[slot, :, : rows.rows(length)], values[slot, :, : rows.rows(length)])
            for (keys, values), rows in self._windows
        ]

    def states(self, first: int, count: int) -> list[NDArray[np.float32]]:
        """States of `count` slots from `first`, as views of the pool."""
        return [state[first : first + count] for state in self._states]

    def put_states(self, slot: int, states: Sequence[NDArray[np.float32]]) -> None:
        """Set a slot's states, in the form of `states` for one slot."""
        for own, state in zip(self.states(slot, 1), states, strict=True):
            own[...] = state

    def save_states(self, slot: int, place: int) -> None:
        """Copy a slot's states and windows to a place, over its contents."""
        length = self._saved_lengths[place] = self._lengths[slot]
        self._copy_state(slot, self._behind(place), length)

    def saved_states(self, place: int) -> list[NDArray[Any]]:
        """The states in a place, then keys and values of each window, each [1, …], as views of the
        pool."""
        row, length = self._behind(place), self._saved_lengths[place]
        windows = (
            array[row : row + 1, :, : rows.rows(length)]
            for pair, rows in self._windows
            for array in pair
        )
        return [*self.states(row, 1), *windows]

    def new_states(self) -> list[NDArray[Any]]:
        """Arrays for the states of one request, in the form of `states`."""
        return [np.empty((1, *state.shape[1:]), state.dtype) for state in self._states]

    def windows_like(self, tokens: int) -> list[NDArray[Any]]:
        """Arrays of the shapes of one request's windows after so many tokens, as `saved_states` has
        them, without memory."""
        return [
            np.broadcast_to(
                np.zeros((), array.dtype), (1, array.shape[1], rows.rows(tokens), array.shape[3])
            )
            for pair, rows in self._windows
            for array in pair
        ]

    def load_states(self, slot: int, place: int) -> None:
        """Copy the states and windows of a place to a slot, and forget tokens behind them. Raises
        KeyError if all states are taken."""
        if not self._with_state[slot]:
            self._check_states()
        length = self._saved_lengths[place]
        self._with_state[slot] = False
        self.shrink(slot, length)
        self._with_state[slot] = True
        self._copy_state(self._behind(place), slot, length)

    def drop_states(self, slot: int) -> None:
        """Free the memory of a slot's states and windows until they are set again."""
        self._with_state[slot] = False
        self._drop_state_pages(slot)

    def drop_saved(self, place: int) -> None:
        """Free the memory of a place."""
        if self._saved_lengths.pop(place, None) is not None:
            self._drop_state_pages(self._behind(place))

    def shrink(self, slot: int, length: int) -> None:
        """Forget tokens after the first `length`, and free their pages."""
        old = self._lengths[slot]
        if length >= old:
            return
        self.wrote(slot, length)
        for pair in self._arrays:
            for array in pair:
                for head in array[slot]:
                    self._tokens.drop(head[length:old])

    def rename(self, request: str, to: str) -> None:
        """Give the slot of `request` to request `to`, which has none."""
        self._requests.rename(request, to)

    def gather(self, requests: Sequence[str], *, spare: bool = False) -> int:
        """Move these requests, in this order, into neighbouring slots. Returns the first slot.

        An unchanged decode batch moves nothing. spare: keep the slot after them free for writing
        until the next `gather`.
        """
        first, swaps = self._requests.gather(requests, at_end=spare)
        for pair in swaps:
            self._swap(*pair)
        last = len(self._requests)
        if spare and self._spare != last:
            self._drop_spare()
            self._spare = last
        return first

    def _drop_spare(self) -> None:
        """Free the pages of the spare slot."""
        if self._spare is not None and self._spare >= len(self._requests):
            for number in range(len(self._arrays)):
                self.drop_layer(number, self._spare)
            self._drop_state_pages(self._spare)
        self._spare = None

    def layer(self, index: int, first: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(keys, values) of `count` slots from `first`, as views of the pool."""
        keys, values = self._arrays[index]
        return keys[first : first + count], values[first : first + count]

    def rows(
        self, index: int, slot: int, first: int, last: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """(keys, values) [num_kv_heads, tokens, head_size] of a slot's tokens, as views."""
        keys, values = self._arrays[index]
        return keys[slot, :, first:last], values[slot, :, first:last]

    @contextlib.contextmanager
    def filling(
        self, index: int, slot: int, tokens: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Views of a slot's first tokens, to be written."""
        yield self.rows(index, slot, 0, tokens)

    def release(self, request: str) -> None:
        """Free a request's slot and its pages; the last request moves into the hole."""
        if request not in self._requests:
            return
        slot, last = self._requests.slot(request), len(self._requests) - 1
        if slot != last:
            length = self._lengths[last]
            for number, pair in enumerate(self._arrays):
                for array in pair:  # overwrites committed pages, which takes the least memory
                    array[slot, :, :length] = array[last, :, :length]
                    for head in array[slot]:
                        self._tokens.drop(head[length:])
                self.drop_layer(number, last)  # now, because there may be no memory for both
            self._move_state(last, slot, length)
            self._lengths[slot] = length
        self._requests.release(request)
        self._lengths.pop()
        self._with_state.pop()
        self._drop_state_pages(last)
        for number in range(len(self._arrays)):
            self.drop_layer(number, last)

    def clear(self) -> None:
        """Free all slots and places."""
        for request in reversed(tuple(self._requests)):  # from the end, so that no request moves
            self.release(request)
        self._drop_spare()
        for place in range(self._places):
            self.drop_saved(place)

    def drop_layer(self, index: int, slot: int) -> None:
        """Free the whole pages of one slot in one layer; their contents are lost."""
        for array in self._arrays[index]:
            self._tokens.drop(array[slot])

    def close(self) -> None:
        """Forget every request. All memory is freed when the last view is gone."""
        self._requests = SlotOrder()
        self._lengths.clear()
        self._with_state.clear()
        self._arrays.clear()
        self._windows.clear()
        self._saved_lengths.clear()
        self._states.clear()
        self._tokens = self._fixed = _Pages(0)

    def _swap(self, a: int, b: int) -> None:
        """Swap two slots piece by piece, which takes little memory at any length."""
        lengths = self._lengths
        for pair in self._arrays:
            for array in pair:
                self._swap_rows(array[a], array[b], lengths[a], lengths[b])
        if self._with_state[a] and self._with_state[b]:
            for pair, rows in self._windows:
                for array in pair:
                    self._swap_rows(
                        array[a], array[b], rows.rows(lengths[a]), rows.rows(lengths[b])
                    )
            for state in self._states:
                kept = state[a].copy()
                state[a] = state[b]
                state[b] = kept
        elif self._with_state[a]:
            self._move_state(a, b, lengths[a])
        else:
            self._move_state(b, a, lengths[b])
        lengths[a], lengths[b] = lengths[b], lengths[a]

    def _check_states(self) -> None:
        """Raises KeyError unless one more slot may have states."""
        if self._states and sum(self._with_state) >= self._most_states:
            raise KeyError(f"all {self._most_states} places for states are taken")

    def _behind(self, place: int) -> int:
        return self._slots + 1 + place

    def _move_state(self, slot: int, to: int, length: int) -> None:
        """Move the states and windows of a slot with `length` tokens to another, or free the
        other's if it has none."""
        if self._with_state[slot]:
            self._copy_state(slot, to, length, moves=True)
        else:
            self._drop_state_pages(to)
        self._with_state[to] = self._with_state[slot]
        self._with_state[slot] = False
        self._drop_state_pages(slot)

    def _copy_state(self, row: int, to: int, length: int, *, moves: bool = False) -> None:
        """Copy the states and windows of `length` tokens. moves: free windows one by one, because
        there may be no memory for both."""
        for pair, rows in self._windows:
            count = rows.rows(length)
            for array in pair:
                array[to, :, :count] = array[row, :, :count]
                for head in array[to]:
                    self._tokens.drop(head[count:])
                if moves:
                    self._tokens.drop(array[row])
        for state in self._states:
            state[to] = state[row]

    def _drop_state_pages(self, row: int) -> None:
        for pair, _ in self._windows:
            for array in pair:
                self._tokens.drop(array[row])
        for state in self._states:
            self._fixed.drop(state[row])

    def _swap_rows(
        self, one: NDArray[Any], other: NDArray[Any], one_length: int, other_length: int
    ) -> None:
        """Swap tokens [heads, context, elements]. The rest of the longer one moves, and its old
        pages are freed."""
        both = min(one_length, other_length)
        for first in range(0, both, _PIECE_TOKENS):
            rows = slice(first, min(first + _PIECE_TOKENS, both))
            kept = one[:, rows].copy()
            one[:, rows] = other[:, rows]
            other[:, rows] = kept
        if one_length == other_length:
            return
        longer, shorter = (one, other) if one_length > both else (other, one)
        rest = slice(both, max(one_length, other_length))
        for from_head, to_head in zip(longer, shorter, strict=True):
            to_head[rest] = from_head[rest]
            self._tokens.drop(from_head[rest])


class _Pages:
    """Memory that the system commits when it is written, and that is freed page by page."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the system refuses the address space."""
        self._memory: mmap.mmap | None = None
        if num_bytes:
            self._memory = private_memory(num_bytes + HUGE_PAGE_BYTES, is_reserved=False)
            # Otherwise a token could take a huge page for each head.
            advise(self._memory, "not huge")
            self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
            self._first = -self._address % HUGE_PAGE_BYTES

    def array(self, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array over the memory from byte `begin` on."""
        count = math.prod(shape)
        if self._memory is None or not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._memory, dtype, count, self._first + begin).reshape(shape)

    def prefer_huge(self, begin: int, num_bytes: int) -> None:
        """Commit these bytes in huge pages, if they fill them and the system has some.

        A token through 24 layers with states of 2 MiB took 14.1 ms on one thread, against 15.4 with
        small pages.
        """
        if self._memory is not None:
            advise(self._memory, "huge", self._first + begin, num_bytes)

    def drop(self, rows: NDArray[Any]) -> None:
        """Free the whole pages in a contiguous part of an array."""
        if self._memory is None:
            return
        start = rows.__array_interface__["data"][0] - self._address
        page = mmap.PAGESIZE
        begin, end = -(-start // page) * page, (start + rows.nbytes) // page * page
        if end > begin:
            advise(self._memory, "drop", begin, end - begin)


def _page_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the pages for float32 of this shape."""
    page = _page_of(shape)
    return -(-math.prod(shape) * 4 // page) * page


def _page_of(shape: tuple[int, ...]) -> int:
    """Bytes of the page for this shape: a huge one if rows fill huge pages."""
    return mmap.PAGESIZE if math.prod(shape[1:]) * 4 % HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
