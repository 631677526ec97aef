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


_PIECE_TOKENS = 256
"""Tokens that are copied at once where two requests change places."""


class KVPool:
    """Keys and values [slots, num_kv_heads, context_tokens, elements] for each layer.

    And states: arrays of one size however many tokens a request has, zeros at first. What they
    hold is of all its tokens, so where there are some, no request can be cut (`can_cut`).

    Not thread-safe: used from the compute thread.
    """

    def __init__(
        self,
        *,
        layers: Sequence[tuple[int, int]],
        slots: int,
        context_tokens: int,
        dtype: type[np.generic] = np.float32,
        states: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Reserves address space for these slots and a spare one; raises MemoryError if even that
        is refused.

        layers: (num_kv_heads, elements of a token's key, or value, of a head) of each. states: the
        shape of each, of one request; float32.
        """
        kind = np.dtype(dtype)
        shapes = [(slots + 1, heads, context_tokens, elements) for heads, elements in layers]
        total_bytes = sum(2 * math.prod(shape) * kind.itemsize for shape in shapes)
        self._memory: mmap.mmap | None = None
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []
        if total_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            try:
                self._memory = mmap.mmap(-1, total_bytes, flags=flags)
            except OSError as error:
                raise MemoryError(
                    f"no address space for {slots} KV caches of {context_tokens} tokens"
                ) from error
            with contextlib.suppress(OSError):  # a system without huge pages
                # Where it gives them unasked, a token would take one for each head.
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
            flat = np.frombuffer(self._memory, dtype=kind)
            self._address = flat.ctypes.data
            begin = 0
            for shape in shapes:
                size = math.prod(shape)
                keys, values = flat[begin : begin + 2 * size].reshape(2, *shape)
                self._arrays.append((keys, values))
                begin += 2 * size
        # Nothing of it is committed before a slot is taken.
        self._states = [np.zeros((slots + 1, *shape), np.float32) for shape in states]
        self._slots = slots
        self._requests = SlotOrder()
        self._lengths: list[int] = []
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

        Raises KeyError when every slot is taken: the caller decides who waits.
        """
        if request in self._requests:
            return self._requests.slot(request)
        if len(self._requests) == self._slots:
            raise KeyError(f"all {self._slots} KV slots are taken")
        slot = self._requests.open(request)
        self._lengths.append(0)
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
        """Of `count` slots from `first`, as views of the pool."""
        return [state[first : first + count] for state in self._states]

    def put_states(self, slot: int, states: Sequence[NDArray[np.float32]]) -> None:
        """Let a slot have these, as `states` gives them of one."""
        for own, state in zip(self.states(slot, 1), states, strict=True):
            own[...] = state

    def shrink(self, slot: int, length: int) -> None:
        """Forget what is behind the first `length` tokens, if there is more, and free its pages."""
        old = self._lengths[slot]
        if length >= old:
            return
        self._lengths[slot] = length
        for pair in self._arrays:
            for array in pair:
                for head in array[slot]:
                    self._drop(head[length:old])

    def rename(self, request: str, to: str) -> None:
        """What `request` has is another one's from now on."""
        self._requests.rename(request, to)

    def gather(self, requests: Sequence[str], *, spare: bool = False) -> int:
        """Bring these requests, in this order, into neighbouring slots; the first one's slot.

        Requests that keep their order and company, as those of a decode batch do, cost nothing.
        spare: the slot behind them is nobody's, to be written to until the next `gather`.
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
        """Nobody needs what the spare slot was written."""
        if self._spare is not None and self._spare >= len(self._requests):
            for number in range(len(self._arrays)):
                self.drop_layer(number, self._spare)
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
                        self._drop(head[length:])
                self.drop_layer(number, last)  # at once: there may be no memory for both
            for state in self._states:
                state[slot] = state[last]
            self._lengths[slot] = length
        self._requests.release(request)
        self._lengths.pop()
        for number in range(len(self._arrays)):
            self.drop_layer(number, last)

    def clear(self) -> None:
        """Free all slots. Views of states that were made before are of nothing then."""
        for request in reversed(tuple(self._requests)):  # so that none moves into a hole
            self.release(request)
        self._drop_spare()
        self._states = [np.zeros(each.shape, np.float32) for each in self._states]

    def drop_layer(self, index: int, slot: int) -> None:
        """Give back the whole pages of one slot in one layer; what was there is lost."""
        if self._memory is not None:
            for array in self._arrays[index]:
                self._drop(array[slot])

    def close(self) -> None:
        """Forget every request and give all memory back once the last view is gone."""
        self._requests = SlotOrder()
        self._lengths.clear()
        self._arrays.clear()
        self._states.clear()
        self._memory = None

    def _swap(self, a: int, b: int) -> None:
        """Piece by piece, so that it takes no memory to speak of, however long they are."""
        lengths = self._lengths
        for pair in self._arrays:
            for array in pair:
                self._swap_rows(array[a], array[b], lengths[a], lengths[b])
        for state in self._states:
            kept = state[a].copy()
            state[a] = state[b]
            state[b] = kept
        lengths[a], lengths[b] = lengths[b], lengths[a]

    def _swap_rows(
        self, one: NDArray[Any], other: NDArray[Any], one_length: int, other_length: int
    ) -> None:
        """Swap tokens [heads, context, elements]. The rest of the longer one moves, and leaves no
        pages behind."""
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
            self._drop(from_head[rest])

    def _drop(self, rows: NDArray[Any]) -> None:
        """Give back the whole pages in a contiguous part of an array."""
        assert self._memory is not None
        start = rows.__array_interface__["data"][0] - self._address
        page = mmap.PAGESIZE
        begin, end = -(-start // page) * page, (start + rows.nbytes) // page * page
        if end > begin:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
