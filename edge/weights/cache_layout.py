"""What a shard keeps of the tokens of a request: keys, values and states, by layer and head.

The names of pieces are the same on every plan, so one shard's can be put together from another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.kernels.kv_cache.cache_size import cache_row
from edge.models.attention import Attention
from edge.weights.formats import KvDtype, kv_bits
from edge.weights.layout import ShardLayout

_SECTION_BYTES = 1 << 19
"""Most bytes of a piece of a window, so that a message has room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayer:
    """The keys and values that a shard keeps of one layer."""

    layer: int
    """Number of the layer that makes them."""
    heads: tuple[range, ...]
    """Each head as its rows of the key matrix."""
    row_bytes: int
    """Bytes of the key, or the value, of one token in one head."""
    kept: int | None = None
    """Rows of a layer that keeps the newest tokens only."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of all heads."""
        return 2 * len(self.heads) * self.row_bytes


def held_layers(layout: ShardLayout, kv_dtype: KvDtype) -> tuple[HeldLayer, ...]:
    """The layers of a shard in the order in which it sends copies. States are not copied."""
    held = []
    for layer, mixer in layout.caches.items():
        dtype, elements = cache_row(mixer.cached_size, kv_bits(kv_dtype))
        held.append(
            HeldLayer(
                layer=layer if mixer.keys_of is None else mixer.keys_of,
                heads=_heads(layout, layer, mixer),
                row_bytes=elements * np.dtype(dtype).itemsize,
                kept=mixer.kept_tokens,
            )
        )
    return tuple(held)


class CachePiece(NamedTuple):
    """A part of one of the arrays that a shard keeps of a request."""

    name: str
    array: int
    """The number of the array."""
    part: tuple[slice | int, ...]
    """Its place in that array."""
    section: tuple[int, int] = (0, 1)
    """Which of how many sections of that: windows may be too long for one piece."""

    def of(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Its part of the arrays, as a view."""
        part, (number, count) = arrays[self.array][self.part], self.section
        return part[len(part) * number // count : len(part) * (number + 1) // count]


def piece_names(pieces: Iterable[CachePiece]) -> list[str]:
    """Each name once: a shard may have a head twice, for query heads of an uneven cut, and for two
    layers."""
    return list(dict.fromkeys(each.name for each in pieces))


def row_pieces(layout: ShardLayout) -> tuple[CachePiece, ...]:
    """Keys and values [heads, tokens, elements] of each layer that keeps all tokens, in turn, as a
    piece for each head."""
    return tuple(_head_pieces(layout, windows=False))


def state_pieces(layout: ShardLayout, count: int) -> tuple[CachePiece, ...]:
    """The `count` states of a request: those of `layout.states` as a piece for each unit; keys and
    values of windows as a piece for each head; others whole, which only a shard of the same layers
    and heads can use."""
    pieces = [*_units(layout), *_head_pieces(layout, windows=True)]
    named = 1 + max((each.array for each in pieces), default=-1)
    same = hashlib.sha256(repr(layout.matrices).encode()).hexdigest()
    pieces += (CachePiece(f"{same}.{number}", number, ()) for number in range(named, count))
    return tuple(pieces)


def _head_pieces(layout: ShardLayout, *, windows: bool) -> Iterator[CachePiece]:
    layers = (each for each in held_layers(layout, "float32") if (each.kept is None) != windows)
    for number, held in enumerate(layers):
        for which, kind in enumerate(("key", "value")):
            for index, head in enumerate(held.heads):
                name, array = f"{held.layer}.{kind}.{head.start}", 2 * number + which
                if held.kept is None:
                    yield CachePiece(name, array, (index,))
                    continue
                count = -(-held.kept * held.row_bytes // _SECTION_BYTES)
                for section in range(count):
                    part = f"{name}.window.{section}"
                    yield CachePiece(part, array, (index,), (section, count))


def _units(layout: ShardLayout) -> Iterator[CachePiece]:
    number = 0
    for layer, mixer in layout.states.items():
        columns = layout.matrix(f"layers.{layer}.{mixer.output_name}").columns
        first = columns.start * mixer.num_units // len(columns)
        for name, (axis, sizes) in zip(mixer.state_names, mixer.state_units, strict=True):
            start = 0
            for section, size in enumerate(sizes):
                for unit in range(first, first + mixer.num_units):
                    part = (*(slice(None),) * axis, slice(start, start + size))
                    yield CachePiece(f"{layer}.{name}.{section}.{unit}", number, part)
                    start += size
            number += 1


def _heads(layout: ShardLayout, layer: int, mixer: Attention) -> tuple[range, ...]:
    if mixer.latent is None:
        name, of = ("qkv", layer) if mixer.keys_of is None else ("key_value", mixer.keys_of)
        keys = f"layers.{of}.key.weight"
        parts = layout.matrix(f"layers.{layer}.{name}").parts
        return tuple(rows for role, rows in parts if role == keys)
    return (range(mixer.latent.rows),)  # all heads share these
