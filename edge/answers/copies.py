"""Copies of the keys and values of an answer, for failover.

The shards of a plan send them to the coordinator. Another plan takes them back if its shards have
the same key heads, in any distribution. It then computes only the tokens without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.protocol.frame_codec import MOST_COPY_BYTES
from edge.protocol.step import MAX_CHUNK_TOKENS
from edge.protocol.topology import Seat
from edge.weights.cache_layout import HeldLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Which keys and values each shard of a plan keeps, and in which form."""

    layers: Mapping[Seat, tuple[HeldLayer, ...]]
    digests: Mapping[Seat, str]
    """Digest of each shard's KV cache format."""
    is_rounded: bool
    """Whether values are quantised, with scales of each shard's own."""

    def serves(self, other: KvLayout) -> bool:
        """Whether a plan with the layout `other` can take copies of this layout."""
        if not all(other.layers.values()):
            return False  # a shard without keys and values could not get the tokens
        if self == other:
            return True
        digests = {*self.digests.values(), *other.digests.values()}
        if self.is_rounded or other.is_rounded or len(digests) != 1:
            return False
        return other._heads() <= self._heads()

    def _heads(self) -> set[tuple[int, range, int]]:
        return {
            (held.layer, head, held.row_bytes)
            for layers in self.layers.values()
            for held in layers
            for head in held.heads
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Keys and values of consecutive tokens from one shard: [tokens, bytes], as in `KvRows`."""

    first: int
    tokens: int
    rows: bytes

    @property
    def last(self) -> int:
        return self.first + self.tokens


@dataclass(slots=True, kw_only=True)
class AnswerCopies:
    """Copies for one answer, by shard."""

    form: KvLayout
    first: int
    """The first token that has copies."""
    copies: dict[Seat, list[Copy]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, seat: Seat, copy: Copy) -> bool:
        """Append a copy that follows the shard's last one. Returns False, and keeps nothing, for
        any other copy."""
        layers, parts = self.form.layers[seat], self.copies.setdefault(seat, [])
        if not layers:
            return False  # empty copies could be sent without end
        if copy.first != (parts[-1].last if parts else self.first):
            return False
        if len(copy.rows) != copy.tokens * _token_bytes(layers):
            return False
        parts.append(copy)
        self.num_bytes += len(copy.rows)
        return True

    def last(self, most: int) -> int:
        """The end of the tokens that every shard has sent copies of, at most `most`."""
        ends = [parts[-1].last if parts else self.first for parts in self._of_all()]
        return min(most, *ends) if ends else self.first

    def _of_all(self) -> list[list[Copy]]:
        return [self.copies.get(seat, []) for seat, layers in self.form.layers.items() if layers]

    def put_into(self, form: KvLayout, last: int) -> AnswerCopies:
        """The copies up to token `last`, in few parts, for the shards of another layout."""
        assert self.form.serves(form)
        kept = AnswerCopies(form=form, first=self.first)
        sent = {
            seat: self._joined(seat, last) for seat, layers in self.form.layers.items() if layers
        }
        heads = {
            name: rows[:, columns]
            for seat, rows in sent.items()
            for name, columns in _columns(self.form.layers[seat])
        }
        for seat, layers in form.layers.items():
            at_once = _tokens_at_once(layers)
            for start in range(self.first, last, at_once):
                stop = min(start + at_once, last)
                some = slice(start - self.first, stop - self.first)
                if form == self.form:
                    rows = sent[seat][some]
                else:
                    rows = np.concatenate([heads[name][some] for name, _ in _columns(layers)], 1)
                kept.add(seat, Copy(first=start, tokens=stop - start, rows=rows.tobytes()))
        return kept

    def _joined(self, seat: Seat, last: int) -> NDArray[np.uint8]:
        """The copies that a shard has sent of all tokens before `last` [tokens, bytes]."""
        rows = b"".join(each.rows for each in self.copies.get(seat, ()))
        whole = np.frombuffer(rows, np.uint8).reshape(-1, _token_bytes(self.form.layers[seat]))
        return whole[: last - self.first]


_Head = tuple[int, int, range]
"""Layer, 0 for keys or 1 for values, and the head."""


def _columns(layers: tuple[HeldLayer, ...]) -> Iterator[tuple[_Head, slice]]:
    """The place of each head in the bytes of a token, in order."""
    start = 0
    for held in layers:
        for which in range(2):
            for head in held.heads:
                yield (held.layer, which, head), slice(start, start + held.row_bytes)
                start += held.row_bytes


def _tokens_at_once(layers: tuple[HeldLayer, ...]) -> int:
    """Tokens of one copy that a shard is given back."""
    return max(1, min(MOST_COPY_BYTES // max(1, _token_bytes(layers)), MAX_CHUNK_TOKENS))


def _token_bytes(layers: tuple[HeldLayer, ...]) -> int:
    return sum(held.token_bytes for held in layers)
