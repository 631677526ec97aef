"""Implementations of KvStorage that programs of several back ends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edge.backends.host_cache import HostCache
from edge.backends.kv_swap import CacheMoves


class SwappedKv:
    """The methods of KvStorage that are the same for every kind of memory."""

    _moves: CacheMoves

    def swap_out(self, request: str) -> None:
        self._moves.swap_out(request)

    def reserve(self, request: str, tokens: int) -> None:
        self._moves.reserve(request, tokens)

    def keep(self, request: str, tokens: int) -> None:
        self._moves.keep(request, tokens)

    def save_state(self, request: str, tokens: int, place: int) -> None:
        self._moves.save_state(request, tokens, place)

    def saved(self, request: str) -> list[int]:
        return self._moves.saved(request)

    def states(self, request: str, tokens: int) -> list[NDArray[Any]] | None:
        return self._moves.states(request, tokens)

    def states_like(self, tokens: int) -> list[NDArray[Any]]:
        return self._moves.states_like(tokens)

    def new_states(self, request: str, tokens: int) -> list[NDArray[Any]]:
        return self._moves.new_states(request, tokens)

    def put_states(self, request: str, tokens: int, states: Sequence[NDArray[Any]]) -> None:
        self._moves.put_states(request, tokens, states)

    def take(self, request: str, source: str, tokens: int, *, moves: bool) -> int:
        return self._moves.take(request, source, tokens, moves=moves)

    def cut(self, request: str, tokens: int) -> None:
        self._moves.cut(request, tokens)


class HostKvStorage(SwappedKv):
    """KvStorage in host memory, without `calibrate` and `cache_digest`. A program that calibrates
    makes a new cache."""

    _cache: HostCache

    def new_rows(self, tokens: int, *, windows: bool = True) -> list[NDArray[Any]]:
        return self._cache.new_rows(tokens, windows=windows)

    def rows(
        self, request: str, first: int, last: int, *, windows: bool = True
    ) -> list[NDArray[Any]] | None:
        if not self._moves.is_inside(request):
            return None
        return self._cache.rows(request, first, last, windows=windows)

    def put_rows(
        self, request: str, first: int, rows: Sequence[NDArray[Any]], *, windows: bool = True
    ) -> None:
        if rows:
            self._moves.make_room(request, first + rows[0].shape[1])
        self._cache.put_rows(request, first, rows, windows=windows)

    def release(self, request: str) -> None:
        self._cache.pool.release(request)
        self._moves.drop(request)
