"""KV caches of every kind for the Triton faces: made from arrays, and read back into them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.kv_cache.token_cache import dequantize_heads, quantize_heads
from tests.support.triton_face import array, rounded, tensor

if TYPE_CHECKING:
    from torch import Tensor

    from edge.kernels.kv_cache.gpu_cache import KvCache

BLOCK_TOKENS = 8
_SENTINEL_CODE = 99
_GROUPED_HEAD = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """bits: None for floats. paged: in blocks whose order says nothing."""

    bits: int | None
    paged: bool

    def __str__(self) -> str:
        return f"{self.bits or 'float'}-{'paged' if self.paged else 'contiguous'}"

    def group_size(self, head_size: int) -> int:
        """With 4 bits a group is smaller than a head where it can be."""
        divides = self.bits == 4 and head_size % _GROUPED_HEAD == 0
        return _GROUPED_HEAD if divides else head_size


CACHE_KINDS = [
    CacheKind(bits=bits, paged=paged) for bits, paged in product((None, 8, 4), (False, True))
]


def make_cache(
    kind: CacheKind, sequences: list[tuple[NDArray[Any], NDArray[Any]]], capacity: int, dtype: str
) -> tuple[KvCache, list[tuple[NDArray[Any], NDArray[Any]]]]:
    """A cache of each sequence's (keys, values) [length, num_kv_heads, head_size].

    Everything else in it is NaN, or codes of NaN scales. Returned beside it is what it stands for.
    """
    from edge.kernels.kv_cache.gpu_cache import KvCache

    parts: dict[str, Any] = {}
    meaning: list[list[NDArray[Any]]] = [[], []]
    table = _table(len(sequences), capacity) if kind.paged else None
    for which, name in enumerate(("key", "value")):
        arrays = [pair[which] for pair in sequences]
        if kind.bits is None:
            stored = [rounded(x, dtype) for x in arrays]
            parts[f"{name}s"] = tensor(_scattered(stored, capacity, table, np.nan), dtype)
            meaning[which] = stored
            continue
        group = kind.group_size(arrays[0].shape[-1])
        coded = [quantize_heads(x, bits=kind.bits, group_size=group) for x in arrays]
        codes = _scattered([c for c, _ in coded], capacity, table, _SENTINEL_CODE)
        scales = _scattered([s for _, s in coded], capacity, table, np.nan)
        parts[f"{name}s"], parts[f"{name}_scales"] = tensor(codes), tensor(scales)
        meaning[which] = [dequantize_heads(c, s) for c, s in coded]
    if table is not None:
        parts["block_table"] = tensor(table)
    return KvCache(**parts), list(zip(*meaning, strict=True))


def sentinel_cache(
    kind: CacheKind, sequences: int, num_kv_heads: int, capacity: int, head_size: int, dtype: str
) -> KvCache:
    """A cache in which nothing was written yet: NaN, or codes of NaN scales."""
    nothing = np.zeros((0, num_kv_heads, head_size), np.float32)
    return make_cache(kind, [(nothing, nothing)] * sequences, capacity, dtype)[0]


def read_cache(
    kind: CacheKind, cache: KvCache, stored: Tensor, scales: Tensor | None
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(what it stands for [sequences, capacity, heads, head_size], where something was written).

    A token that was written in part is an error.
    """
    values = _in_order(array(stored), cache)
    if scales is not None:
        values = dequantize_heads(values, _in_order(array(scales), cache))
    there = np.isfinite(values)
    whole = there.all(axis=(2, 3))
    assert (whole == there.any(axis=(2, 3))).all(), "a token was written in part"
    assert kind.paged == (cache.block_table is not None)
    return values, whole


def _gather_blocks(pool: NDArray[Any], blocks: NDArray[np.integer], length: int) -> NDArray[Any]:
    """pool [blocks, num_kv_heads, block_tokens, n], one sequence's blocks in order → its tokens.

    The result is [length, num_kv_heads, n].
    """
    in_order = pool[blocks].transpose(0, 2, 1, 3)
    tokens: NDArray[Any] = in_order.reshape(-1, *in_order.shape[2:])[:length]
    return tokens


def _in_order(pool: NDArray[Any], cache: KvCache) -> NDArray[Any]:
    if cache.block_table is None:
        return pool.transpose(0, 2, 1, 3)
    rows = [_gather_blocks(pool, row, cache.capacity) for row in array(cache.block_table)]
    return np.stack(rows)


def _table(sequences: int, capacity: int) -> NDArray[np.int32]:
    """Blocks in no order, some of the pool never used."""
    each = -(-capacity // BLOCK_TOKENS)
    order = np.random.default_rng(sequences).permutation(sequences * each + 2)
    return order[: sequences * each].reshape(sequences, each).astype(np.int32)


def _scattered(
    arrays: list[NDArray[Any]], capacity: int, table: NDArray[np.int32] | None, fill: float
) -> NDArray[Any]:
    """[blocks, heads, block_tokens, n] with each sequence [length, heads, n] in its place."""
    heads, width = arrays[0].shape[1:]
    tokens = capacity if table is None else BLOCK_TOKENS
    blocks = len(arrays) if table is None else table.size + 2
    pool = np.full((blocks, heads, tokens, width), fill, arrays[0].dtype)
    for sequence, values in enumerate(arrays):
        for position, token in enumerate(values):
            block = sequence if table is None else table[sequence, position // tokens]
            pool[block, :, position % tokens] = token
    return pool
