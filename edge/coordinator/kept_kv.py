"""Copies of the keys and values of a request, as the shards of a plan have sent them.

A plan whose shards have the same heads of keys, however they are spread over them, takes them back:
then only what is not kept has to be computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.kernels.kv_cache.cache_size import cache_row
from edge.models.attention import Attention
from edge.protocol.messages import MOST_COPY_BYTES
from edge.protocol.step import MAX_CHUNK_TOKENS
from edge.protocol.topology import Seat
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayer:
    """What a shard keeps of one layer."""

    layer: int
    heads: tuple[range, ...]
    """Each by its rows of the layer's keys, or of what it gives where keys have none."""
    row_bytes: int
    """Of the key, or the value, of one token in one head."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of all heads."""
        return 2 * len(self.heads) * self.row_bytes


def held_layers(layout: ShardLayout, kv_dtype: KvDtype) -> tuple[HeldLayer, ...]:
    """In the order in which a shard sends them; of states it sends nothing."""
    held = []
    for layer, mixer in layout.attentions.items():
        dtype, elements = cache_row(mixer.head_size, kv_bits(kv_dtype))
        held.append(
            HeldLayer(
                layer=layer,
                heads=_heads(layout, layer, mixer),
                row_bytes=elements * np.dtype(dtype).itemsize,
            )
        )
    return tuple(held)


def _heads(layout: ShardLayout, layer: int, mixer: Attention) -> tuple[range, ...]:
    if mixer.latent is None:
        keys = f"layers.{layer}.key.weight"
        parts = layout.matrix(f"layers.{layer}.qkv").parts
        return tuple(rows for role, rows in parts if role == keys)
    # Each head has keys of its own, by no rows that are only theirs; so by what it gives.
    given, size = layout.matrix(f"layers.{layer}.output").columns, mixer.value_size
    return tuple(given[start : start + size] for start in range(0, len(given), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvForm:
    """Which shard keeps what, and how."""

    layers: Mapping[Seat, tuple[HeldLayer, ...]]
    digests: Mapping[Seat, str]
    """Of how each shard keeps keys and values."""
    is_rounded: bool
    """By scales that each shard has chosen for itself."""

    def serves(self, other: KvForm) -> bool:
        """Whether copies of this form can be put into the other one."""
        if not all(other.layers.values()):
            return False  # who keeps nothing is given nothing, nor told of tokens in that way
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
    """Of some tokens, from one shard: of each layer the keys, then the values, each
    [heads, tokens, bytes]."""

    first: int
    tokens: int
    rows: bytes

    @property
    def last(self) -> int:
        return self.first + self.tokens


@dataclass(slots=True, kw_only=True)
class KeptKv:
    """Of one request."""

    form: KvForm
    first: int
    """The token from which on there are copies."""
    copies: dict[Seat, list[Copy]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, seat: Seat, copy: Copy) -> bool:
        """Keep what follows what the shard has sent; False, and nothing is kept, of all else."""
        layers, parts = self.form.layers[seat], self.copies.setdefault(seat, [])
        if not layers:
            return False  # copies of nothing would be without end
        if copy.first != (parts[-1].last if parts else self.first):
            return False
        if len(copy.rows) != copy.tokens * _token_bytes(layers):
            return False
        parts.append(copy)
        self.num_bytes += len(copy.rows)
        _join_the_last(layers, parts)
        return True

    def last(self, most: int) -> int:
        """Up to which token, `most` at the most, every shard has sent copies."""
        ends = [parts[-1].last if parts else self.first for parts in self._of_all()]
        return min(most, *ends) if ends else self.first

    def _of_all(self) -> list[list[Copy]]:
        return [self.copies.get(seat, []) for seat, layers in self.form.layers.items() if layers]

    def put_into(self, form: KvForm, last: int) -> KeptKv:
        """The same up to token `last`, as the shards of this form take it back, in few parts."""
        assert self.form.serves(form)
        kept = KeptKv(form=form, first=self.first)
        if form == self.form:
            for seat, layers in form.layers.items():
                for part in self.copies.get(seat, ()):
                    if (stop := min(part.last, last)) > part.first:
                        kept.add(seat, _joined(layers, [part], part.first, stop))
                kept._join_all(seat)
            return kept
        heads = {
            (held.layer, head): rows
            for seat, layers in self.form.layers.items()
            for held, of_layer in zip(
                layers, _rows(layers, self.copies.get(seat, ()), self.first, last), strict=True
            )
            for head, rows in zip(held.heads, np.moveaxis(of_layer, 1, 0), strict=True)
        }
        for seat, layers in form.layers.items():
            at_once = _tokens_at_once(layers)
            for start in range(self.first, last, at_once):
                stop = min(start + at_once, last)
                some = slice(start - self.first, stop - self.first)
                parts = [
                    np.stack([heads[held.layer, head][:, some] for head in held.heads], 1)
                    for held in layers
                ]
                rows = b"".join(each.tobytes() for each in parts)
                kept.add(seat, Copy(first=start, tokens=stop - start, rows=rows))
        return kept

    def _join_all(self, seat: Seat) -> None:
        layers, parts = self.form.layers[seat], self.copies.get(seat, [])
        if small := _small(layers, parts):
            parts[-len(small) :] = [_joined(layers, small, small[0].first, small[-1].last)]


def _small(layers: tuple[HeldLayer, ...], parts: Sequence[Copy]) -> list[Copy]:
    """The last ones, up to one that is as large as one may be."""
    at_once = _tokens_at_once(layers)
    found = itertools.takewhile(lambda each: each.tokens < at_once, reversed(parts))
    return list(found)[::-1]


def _join_the_last(layers: tuple[HeldLayer, ...], parts: list[Copy]) -> None:
    """Once they are enough for one that is as large as one may be: to give back few large ones
    takes less time than many small ones, and then somebody waits for it."""
    small, at_once = _small(layers, parts), _tokens_at_once(layers)
    if len(small) < 2 or (stop := small[0].first + at_once) > small[-1].last:
        return
    joined = [_joined(layers, small, small[0].first, stop)]
    if stop < small[-1].last:
        joined.append(_joined(layers, small[-1:], stop, small[-1].last))
    parts[-len(small) :] = joined


def _joined(layers: tuple[HeldLayer, ...], parts: Sequence[Copy], first: int, last: int) -> Copy:
    """One of tokens [first, last), all of which are in these."""
    if len(parts) == 1 and (parts[0].first, parts[0].last) == (first, last):
        return parts[0]
    rows = b"".join(each.tobytes() for each in _rows(layers, parts, first, last))
    return Copy(first=first, tokens=last - first, rows=rows)


def _rows(
    layers: tuple[HeldLayer, ...], parts: Sequence[Copy], first: int, last: int
) -> list[NDArray[np.uint8]]:
    """Of each layer, keys and values [2, heads, tokens, bytes] of the tokens [first, last)."""
    whole = [np.empty((2, len(h.heads), last - first, h.row_bytes), np.uint8) for h in layers]
    for copy in parts:
        start, stop = max(first, copy.first), min(last, copy.last)
        if start >= stop:
            continue
        offset = 0
        for held, into in zip(layers, whole, strict=True):
            size = copy.tokens * held.token_bytes
            part = np.frombuffer(copy.rows, np.uint8, size, offset)
            part = part.reshape(2, len(held.heads), copy.tokens, held.row_bytes)
            offset += size
            some = part[:, :, start - copy.first : stop - copy.first]
            into[:, :, start - first : stop - first] = some
    return whole


def _tokens_at_once(layers: tuple[HeldLayer, ...]) -> int:
    """In one copy that is given back."""
    return max(1, min(MOST_COPY_BYTES // max(1, _token_bytes(layers)), MAX_CHUNK_TOKENS))


def _token_bytes(layers: tuple[HeldLayer, ...]) -> int:
    return sum(held.token_bytes for held in layers)
