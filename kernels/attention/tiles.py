"""Attention in tiles: which forms the operator of kernels/native computes, and its memory.

It reads the keys part by part, as FlashAttention does, so no scores over the whole context are
held. See native/src/attention.h, whose sizes these are.
"""

from __future__ import annotations

from edge.kernels.attention.reference import PackedAttention
from edge.kernels.kv_cache.cache_size import cache_head_size, keeps_unrounded

LARGEST_HEAD = 512
"""Elements of a head, at most."""
_PART_KEYS = 512
_MOST_QUERIES = 24
_ENOUGH_PARTS = 32
_PAGE_FLOATS = (2 << 20) // 4
"""Larger memory takes whole pages of this size."""


def attends_in_tiles(form: PackedAttention, kv_bits: int | None) -> bool:
    """Whether the operator computes this form, with keys and values of kv_bits (None: float32)."""
    return kv_bits in {None, 8, 4} and form.head_size <= LARGEST_HEAD


def tile_values(form: PackedAttention, kv_bits: int | None, rows: int, context_tokens: int) -> int:
    """Floats of the operator's own memory in a step: turned queries, results of parts of the keys
    where few rows are divided over threads, and unrounded keys and values of the step."""
    queries, size = rows * form.num_heads, cache_head_size(form.head_size, kv_bits)
    parts = -(-context_tokens // _PART_KEYS)
    if form.window is not None:  # which begins anywhere in a part
        seen = form.window + rows - 1
        parts = min(parts, (seen + _PART_KEYS - 2) // _PART_KEYS + 1)
    values = _values(queries, size, parts)
    if keeps_unrounded(kv_bits):
        values += 2 * rows * form.num_kv_heads * size
    return _in_pages(values)


def joined_tile_values(heads: int, half_size: int, rows: int, context_tokens: int) -> int:
    """The same where a row of keys and one of values are joined: queries have two halves."""
    return _in_pages(2 * _values(rows * heads, half_size, -(-context_tokens // _PART_KEYS)))


def _values(queries: int, size: int, parts: int) -> int:
    return queries * size + min(queries, _ENOUGH_PARTS * _MOST_QUERIES) * parts * (2 + size)


def _in_pages(values: int) -> int:
    return values if values < _PAGE_FLOATS else -(-values // _PAGE_FLOATS) * _PAGE_FLOATS
