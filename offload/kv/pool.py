"""KV caches of several requests, side by side, in memory that costs nothing until it is written.

A slot per request, slots packed without holes, so that any run of neighbouring requests is one
contiguous array and a batch needs no copy. Address space is reserved for the longest context of
every slot; the system commits pages as tokens reach them, and a released slot gives them back.
(After vAttention: contiguous in virtual memory, committed on demand. Prabhu et al., 2024.)
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

_MAP_NORESERVE = 0x4000
"""Linux's; the mmap module has no name for it. Address space is not counted as memory in use."""


_HUGE_PAGE_BYTES = 2 << 20
"""For states that are whole ones. One token through 24 layers with states of 2 MiB, on one thread:
14.1 ms, against 15.4 with small pages."""

_PIECE_TOKENS = 256
"""Tokens that are copied at once where two requests change places."""


class KVPool:
    """Keys and values [slots, num_kv_heads, context_tokens, elements] for each layer.

    States are arrays of a fixed size for each request, zeros at first. A state covers all tokens of
    its request, so a request with states cannot be cut (`can_cut`). Saved copies lie in places of
    their own, and a slot may be without its state. Not thread-safe: used from the compute thread.
    """

    def __init__(
        self,
        *,
        layers: Sequence[tuple[int, int]],
        slots: int,
        context_tokens: int,
        dtype: type[np.generic] = np.float32,
        states: Sequence[tuple[int, ...]] = (),
        most_states: int | None = None,
        places: int = 0,
    ) -> None:
        """Reserves address space for these slots and a spare one; raises MemoryError if even that
        is refused.

        layers: (num_kv_heads, elements of a token's key, or value, of a head) of each. states: the
        shape of each, of one request; float32. most_states: slots that have them at once, None for
        all. places: for copies of them.
        """
        kind = np.dtype(dtype)
        shapes = [(slots + 1, heads, context_tokens, elements) for heads, elements in layers]
        of_states = [(slots + 1 + places, *shape) for shape in states]
        try:
            self._tokens = _Pages(sum(2 * math.prod(shape) * kind.itemsize for shape in shapes))
            self._fixed = _Pages(sum(map(_page_bytes, of_states)))
        except OSError as error:
            raise MemoryError(
                f"no address space for {slots} KV caches of {context_tokens} tokens"
            ) from error
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []
        begin = 0
        for shape in shapes:
            size = 2 * math.prod(shape)
            keys, values = self._tokens.array(begin, (2, *shape), kind)
            self._arrays.append((keys, values))
            begin += size * kind.itemsize
        begin, found = 0, {}
        for number in sorted(
            range(len(of_states)), key=lambda number: -_page_of(of_states[number])
        ):
            # From a page on: the states of real models are whole pages, so all can be given back.
            rows = of_states[number]
            found[number] = self._fixed.array(begin, rows, np.dtype(np.float32))
            if _page_of(rows) == _HUGE_PAGE_BYTES:
                self._fixed.prefer_huge(begin, _page_bytes(rows))
            begin += _page_bytes(rows)
        self._states: list[NDArray[np.float32]] = [found[number] for number in range(len(found))]
        """States of slots, then those of places."""
        self._slots = slots
        self._places = places
        self._most_states = slots if most_states is None else most_states
        self._requests = SlotOrder()
        self._lengths: list[int] = []
        self._with_state: list[bool] = []
        """For each slot that is taken, whether it has a state."""
        self._spare: int | None = None
        """The slot without a request that may have pages."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens kept for all requests together."""
        return sum(self._lengths)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    @property
    def slots(self) -> Iterator[tuple[int, str]]:
        """Each that is taken, and whose it is."""
        return enumerate(self._requests)

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._lengths[slot]

    def open(self, request: str) -> int:
        """The request's slot, a new one at the end if it has none.

        Raises KeyError when every slot, or every state, is taken.
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
        """The slot now holds `length` tokens; only these are moved when slots are packed."""
        self._lengths[slot] = length

    @property
    def can_cut(self) -> bool:
        """What a request has of its first tokens is what it had when it had no more."""
        return not self._states

    def states(self, first: int, count: int) -> list[NDArray[np.float32]]:
        """States of `count` slots from `first`, as views of the pool."""
        return [state[first : first + count] for state in self._states]

    def put_states(self, slot: int, states: Sequence[NDArray[np.float32]]) -> None:
        """Let a slot have these, as `states` gives them of one."""
        for own, state in zip(self.states(slot, 1), states, strict=True):
            own[...] = state

    def save_states(self, slot: int, place: int) -> None:
        """Copy a slot's states to a place, over what is there."""
        for state in self._states:
            state[self._behind(place)] = state[slot]

    def load_states(self, slot: int, place: int) -> None:
        """Let a slot have those of a place. KeyError when too many others have some."""
        if not self._with_state[slot]:
            self._check_states()
        self._with_state[slot] = True
        for state in self._states:
            state[slot] = state[self._behind(place)]

    def drop_states(self, slot: int) -> None:
        """Give back the memory of a slot's states, until it is given some."""
        self._with_state[slot] = False
        self._drop_state_pages(slot)

    def shrink(self, slot: int, length: int) -> None:
        """Forget tokens after the first `length`, and free its pages."""
        old = self._lengths[slot]
        if length >= old:
            return
        self._lengths[slot] = length
        for pair in self._arrays:
            for array in pair:
                for head in array[slot]:
                    self._tokens.drop(head[length:old])

    def rename(self, request: str, to: str) -> None:
        """What `request` has is another one's from now on."""
        self._requests.rename(request, to)

    def gather(self, requests: Sequence[str], *, spare: bool = False) -> int:
        """Bring these requests, in this order, into neighbouring slots; the first one's slot.

        A decode batch that stays the same costs nothing. spare: the slot after them is free, to be
        written to until the next `gather`.
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
        """The spare slot's contents may be lost."""
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
        """The first tokens of a slot, to be written: the same views."""
        yield self.rows(index, slot, 0, tokens)

    def release(self, request: str) -> None:
        """Free a request's slot and its pages; the last request moves into the hole."""
        if request not in self._requests:
            return
        slot, last = self._requests.slot(request), len(self._requests) - 1
        if slot != last:
            length = self._lengths[last]
            for number, pair in enumerate(self._arrays):
                for array in pair:  # over what is there, which takes the least memory
                    array[slot, :, :length] = array[last, :, :length]
                    for head in array[slot]:
                        self._tokens.drop(head[length:])
                self.drop_layer(number, last)  # at once: there may be no memory for both
            self._move_state(last, slot)
            self._lengths[slot] = length
        self._requests.release(request)
        self._lengths.pop()
        self._with_state.pop()
        self._drop_state_pages(last)
        for number in range(len(self._arrays)):
            self.drop_layer(number, last)

    def clear(self) -> None:
        """Free all slots and places."""
        for request in reversed(tuple(self._requests)):  # so that none moves into a hole
            self.release(request)
        self._drop_spare()
        for place in range(self._places):
            self._drop_state_pages(self._behind(place))

    def drop_layer(self, index: int, slot: int) -> None:
        """Give back the whole pages of one slot in one layer; what was there is lost."""
        for array in self._arrays[index]:
            self._tokens.drop(array[slot])

    def close(self) -> None:
        """Forget every request and give all memory back once the last view is gone."""
        self._requests = SlotOrder()
        self._lengths.clear()
        self._with_state.clear()
        self._arrays.clear()
        self._states.clear()
        self._tokens = self._fixed = _Pages(0)

    def _swap(self, a: int, b: int) -> None:
        """Piece by piece, so that it takes no memory to speak of, however long they are."""
        lengths = self._lengths
        for pair in self._arrays:
            for array in pair:
                self._swap_rows(array[a], array[b], lengths[a], lengths[b])
        if self._with_state[a] and self._with_state[b]:
            for state in self._states:
                kept = state[a].copy()
                state[a] = state[b]
                state[b] = kept
        elif self._with_state[a]:
            self._move_state(a, b)
        else:
            self._move_state(b, a)
        lengths[a], lengths[b] = lengths[b], lengths[a]

    def _check_states(self) -> None:
        """Raises KeyError unless one more slot may have states."""
        if self._states and sum(self._with_state) >= self._most_states:
            raise KeyError(f"all {self._most_states} places for states are taken")

    def _behind(self, place: int) -> int:
        return self._slots + 1 + place

    def _move_state(self, slot: int, to: int) -> None:
        """What a slot has, be it nothing; it has nothing then."""
        if self._with_state[slot]:
            for state in self._states:
                state[to] = state[slot]
        else:
            self._drop_state_pages(to)
        self._with_state[to] = self._with_state[slot]
        self._with_state[slot] = False
        self._drop_state_pages(slot)

    def _drop_state_pages(self, row: int) -> None:
        for state in self._states:
            self._fixed.drop(state[row])

    def _swap_rows(
        self, one: NDArray[Any], other: NDArray[Any], one_length: int, other_length: int
    ) -> None:
        """Swap tokens [heads, context, elements]. The rest of the longer one moves, and its pages
        are freed."""
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
    """Memory that the system commits as it is written, and takes back page by page."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError where not even the address space is given."""
        self._memory: mmap.mmap | None = None
        if num_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=flags)
            with contextlib.suppress(OSError):  # a system without huge pages
                # Where it gives them unasked, a token would take one for each head.
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
            self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
            self._first = -self._address % _HUGE_PAGE_BYTES

    def array(self, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """From a byte on."""
        count = math.prod(shape)
        if self._memory is None or not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._memory, dtype, count, self._first + begin).reshape(shape)

    def prefer_huge(self, begin: int, num_bytes: int) -> None:
        """Commit these in huge pages, as far as they are whole ones and the system has them."""
        if self._memory is not None:
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._first + begin, num_bytes)

    def drop(self, rows: NDArray[Any]) -> None:
        """Give back the whole pages in a contiguous part of an array."""
        if self._memory is None:
            return
        start = rows.__array_interface__["data"][0] - self._address
        page = mmap.PAGESIZE
        begin, end = -(-start // page) * page, (start + rows.nbytes) // page * page
        if end > begin:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _page_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the pages for float32 of this shape."""
    page = _page_of(shape)
    return -(-math.prod(shape) * 4 // page) * page


def _page_of(shape: tuple[int, ...]) -> int:
    """Bytes of a page for it: a huge one where each row is whole ones."""
    return mmap.PAGESIZE if math.prod(shape[1:]) * 4 % _HUGE_PAGE_BYTES else _HUGE_PAGE_BYTES
