"""Content of stored prefixes: a shard's keys, values and states as named pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import KvStorage
from edge.engine.prefix_keys import STATES
from edge.offload import Pieces, PrefixPart, PrefixRecords, as_bytes
from edge.weights.cache_layout import piece_names, row_pieces, state_pieces
from edge.weights.layout import ShardLayout

Array = NDArray[Any]
Arrays = Sequence[Array]


class PrefixForm:
    """The pieces of a shard's blocks and snapshots, and arrays for one of them."""

    def __init__(self, layout: ShardLayout, program: KvStorage, tokens: int) -> None:
        """tokens: most in a block."""
        self._room = program.new_rows(tokens, windows=False)
        self._blocks: dict[range, tuple[Pieces, list[tuple[Array, Array]]]] = {}
        """What a block fills in these buffers, by its rows there; and copies of it."""
        self._row_pieces = row_pieces(layout)
        self.states_like = program.states_like
        self._state_pieces = state_pieces(layout, len(program.states_like(0)))
        names = piece_names(self._row_pieces)
        self.block = PrefixPart.of(names)
        self.snapshot = PrefixPart.of([*names, *piece_names(self._state_pieces)])

    def room(self, tokens: int, first: int = 0) -> Arrays:
        """The only buffers, for rows of so many tokens, from row `first` on."""
        return [each[:, first : first + tokens] for each in self._room]

    def pieces(self, rows: Arrays, states: Arrays = ()) -> Pieces:
        """The pieces of a block, or with states of a snapshot."""
        return dict(self._parts(rows, states))

    def _parts(self, rows: Arrays, states: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from ((each.name, each.of(rows)) for each in self._row_pieces)
        if states:
            whole = [each[0] for each in states]
            yield from ((each.name, each.of(whole)) for each in self._state_pieces)

    def read_block(
        self, records: PrefixRecords, ids: Collection[str], secret: bytes, at: range
    ) -> bool:
        """Fill these rows of the buffers; see `PrefixRecords.read`. The places of its pieces are
        kept, as a prompt has hundreds of blocks."""
        if at not in self._blocks:
            parts = list(self._parts(self.room(len(at), at.start), ()))
            pieces = dict(parts)
            copies = [(each, pieces[name]) for name, each in parts if each is not pieces[name]]
            self._blocks[at] = ({name: as_bytes(each) for name, each in pieces.items()}, copies)
        into, copies = self._blocks[at]
        if not records.read(ids, into, secret):
            return False
        for array, read in copies:
            array[...] = read
        return True

    def read(
        self,
        records: PrefixRecords,
        ids: Collection[str],
        secret: bytes,
        rows: Arrays,
        states: Arrays = (),
    ) -> bool:
        """Fill the arrays; see `PrefixRecords.read`."""
        pieces = self.pieces(rows, states)
        if not records.read(ids, pieces, secret):
            return False
        for name, array in self._parts(rows, states):
            if not np.may_share_memory(array, pieces[name]):
                array[...] = pieces[name]
        return True


class Computed(NamedTuple):
    tokens: int
    rows: Arrays
    states: Arrays


def computed(program: KvStorage, request: str, size: int, kind: int, end: int) -> Computed | None:
    """A block of `kind` tokens, or the snapshot behind whole blocks of `size` tokens, that ends at
    token `end`; None if it is not computed, or not there any more."""
    tokens = kind or end % size
    rows = program.rows(request, end - tokens, end, windows=False)
    states = program.states(request, end) if kind == STATES else ()
    return None if rows is None or states is None else Computed(tokens, rows, states)
