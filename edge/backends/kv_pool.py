"""The pool of keys and values: what a back end's memory for them can do for `kv_swap.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
