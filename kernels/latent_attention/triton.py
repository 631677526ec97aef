"""Latent attention on a GPU, over a float `KvCache` whose keys and values are halves of rows.

Two kernels: one turns what turns with its position, puts queries for rows together and stores rows;
the other attends as `attention/triton.py` does, with each row read once as key and as value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.attention.triton import combine, key_splits
from edge.kernels.kv_cache.gpu_cache import KvCache
from edge.kernels.latent_attention.reference import LatentForm
from edge.kernels.triton_launch import (
    FLOATS,
    INTEGERS,
    SMALLEST_DOT,
    Launch,
    check,
    num_processors,
    output,
    padded,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_MOST_ROWS, _KEYS = 16, 16


@triton.jit
def _rows_kernel(
    absorbed, query, made_of, shared, out, first, second, table, cos, sin, positions, sequences,
    query_stride, made_of_stride, shared_stride, block_stride, token_stride, table_stride,
    block_tokens, capacity, angles, num_heads,
    rank: tl.constexpr, turned: tl.constexpr, head_size: tl.constexpr, half: tl.constexpr,
    interleaved: tl.constexpr, paged: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One head's query for rows, or behind the heads the row itself, of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    if (position < 0) | (position >= capacity) | (position >= angles):
        return
    at = tl.arange(0, block)
    is_row = head == num_heads
    if is_row:
        source, turning = made_of + token * made_of_stride, shared + token * shared_stride
    else:
        source = absorbed + (token * num_heads + head) * rank
        turning = query + token * query_stride + head * head_size
    still = tl.load(source + at, mask=at < rank, other=0.0).to(tl.float32)
    element = at - rank
    turns = (element >= 0) & (element < turned)
    if interleaved:
        is_first = element % 2 == 0
        pair = element // 2
        other = tl.where(is_first, element + 1, element - 1)
    else:
        is_first = element < turned // 2
        pair = tl.where(is_first, element, element - turned // 2)
        other = tl.where(is_first, element + turned // 2, element - turned // 2)
    own = tl.load(turning + element, mask=turns, other=0.0).to(tl.float32)
    across = tl.load(turning + other, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + position * (turned // 2) + pair, mask=turns, other=0.0)
    s = tl.load(sin + position * (turned // 2) + pair, mask=turns, other=0.0)
    whole = still + own * c + tl.where(is_first, -across, across) * s
    inside = at < 2 * half
    if not is_row:
        start = out + (token * num_heads + head) * (2 * half)
        tl.store(start + at, whole.to(out.dtype.element_ty), mask=inside)
        return
    sequence = tl.load(sequences + token).to(tl.int64)
    if paged:
        cell = tl.load(table + sequence * table_stride + position // block_tokens).to(tl.int64)
        place = position % block_tokens
    else:
        cell, place = sequence, position
    slot = cell * block_stride + place * token_stride
    whole = whole.to(first.dtype.element_ty)
    tl.store(first + slot + at, whole, mask=at < half)
    tl.store(second + slot + at - half, whole, mask=(at >= half) & inside)


@triton.jit(do_not_specialize=["splits", "num_tokens"])
def _attend_kernel(
    query, out, partial, levels, first, second, table, starts, lengths, num_tokens,
    block_stride, token_stride, block_tokens, table_stride, splits, scale,
    group: tl.constexpr, half: tl.constexpr, paged: tl.constexpr, divides: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr, block_half: tl.constexpr,
):  # fmt: skip
    """Programs (tile of rows, sequence × part of the keys). See `attend_tile`."""
    sequence = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    first_query = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - first_query
    first_row = tl.program_id(0) * block_rows
    if first_row >= num_queries * group:
        return
    before = tl.load(lengths + sequence) - num_queries
    row = first_row + tl.arange(0, block_rows)
    row_inside = row < num_queries * group
    token, head = row // group, row % group
    position = before + token
    at = tl.arange(0, block_half)
    inside = row_inside[:, None] & (at < half)[None, :]
    use = (first_query + token).to(tl.int64) * group + head
    start = use[:, None] * (2 * half) + at[None, :]
    q_first = tl.load(query + start, mask=inside, other=0.0)
    q_second = tl.load(query + start + half, mask=inside, other=0.0)
    last_row = tl.minimum(first_row + block_rows, num_queries * group) - 1
    end = before + last_row // group + 1
    begin = 0
    if divides:
        part = tl.cdiv(tl.cdiv(end, splits), block_keys) * block_keys
        begin = split * part
        end = tl.minimum(begin + part, end)
    sums_first = tl.zeros((block_rows, block_half), dtype=tl.float32)
    sums_second = tl.zeros((block_rows, block_half), dtype=tl.float32)
    total = tl.zeros((block_rows,), dtype=tl.float32)
    peak = tl.full((block_rows,), float("-inf"), dtype=tl.float32)
    table_row = table + sequence.to(tl.int64) * table_stride
    for key in range(begin, end, block_keys):
        key_at = key + tl.arange(0, block_keys)
        present = key_at < end
        if paged:
            found = tl.where(present, key_at, begin) // block_tokens
            cell = tl.load(table_row + found).to(tl.int64)
            place = key_at % block_tokens
        else:
            cell, place = sequence.to(tl.int64), key_at
        slot = (cell * block_stride + place.to(tl.int64) * token_stride)[:, None] + at[None, :]
        known = present[:, None] & (at < half)[None, :]
        k_first = tl.load(first + slot, mask=known, other=0.0).to(q_first.dtype)
        k_second = tl.load(second + slot, mask=known, other=0.0).to(q_first.dtype)
        scores = tl.dot(q_first, tl.trans(k_first), input_precision="ieee")
        scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision="ieee")
        scores *= scale * _LOG2_E
        visible = present[None, :] & (key_at[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, axis=1)
        weights = weights.to(q_first.dtype)
        sums_first = tl.dot(weights, k_first, sums_first * fade[:, None], input_precision="ieee")
        sums_second = tl.dot(weights, k_second, sums_second * fade[:, None], input_precision="ieee")
        peak = new_peak
    whole = tl.where(total == 0.0, 1.0, total)
    sums_first /= whole[:, None]
    sums_second /= whole[:, None]
    if not divides:
        tl.store(out + start, sums_first.to(out.dtype.element_ty), mask=inside)
        tl.store(out + start + half, sums_second.to(out.dtype.element_ty), mask=inside)
    else:
        part_of = split.to(tl.int64) * num_tokens * group
        shifted = partial + part_of * (2 * half) + start
        tl.store(shifted, sums_first, mask=inside)
        tl.store(shifted + half, sums_second, mask=inside)
        level = tl.where(total == 0.0, float("-inf"), peak + tl.log2(whole))
        tl.store(levels + part_of + use, level, mask=row_inside)


def store_rows(
    absorbed: Tensor,
    query: Tensor,
    made_of: Tensor,
    shared: Tensor,
    cache: KvCache,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor,
    sequences: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """Turn queries and rows, store rows. Returns queries for rows [tokens, num_heads, 2 · half].

    absorbed [tokens, num_heads, rank]; query [tokens, num_heads · head_size], of whose heads the
    first elements turn; made_of [tokens, rank]; shared [tokens, turned]. cos, sin [angles,
    turned / 2]. positions, sequences: see `rope_store`. Raises ValueError.
    """
    check("absorbed", absorbed, dtypes=FLOATS, shape=(None, None, None))
    tokens, heads, rank = absorbed.shape
    turned, half = 2 * cos.shape[1], cache.head_size
    for name, each, columns in (
        ("query", query, None), ("made_of", made_of, rank), ("shared", shared, turned),
    ):  # fmt: skip
        shape = (tokens, columns)
        check(name, each, dtypes=FLOATS, shape=shape, like=absorbed, contiguous=False)
    for name, index in (("positions", positions), ("sequences", sequences)):
        check(name, index, dtypes=INTEGERS, shape=(tokens,), like=absorbed)
    if rank + turned > 2 * half or cache.bits is not None or cache.num_kv_heads != 1:
        raise ValueError(f"rows of {rank} + {turned} elements in a cache of {2 * half}")
    out = torch.empty(tokens, heads, 2 * half, dtype=absorbed.dtype, device=absorbed.device)
    if not tokens:
        return out
    table = cache.block_table
    _rows_kernel[tokens, heads + 1](
        absorbed, query, made_of, shared, out, cache.keys, cache.values,
        sequences if table is None else table, cos, sin, positions, sequences,
        query.stride(0), made_of.stride(0), shared.stride(0),
        cache.keys.stride(0), cache.keys.stride(2), 0 if table is None else table.stride(0),
        cache.block_tokens, cache.capacity, cos.shape[0], heads,
        rank=rank, turned=turned, head_size=query.shape[1] // heads, half=half,
        interleaved=interleaved, paged=table is not None, block=padded(2 * half),
        **Launch(num_warps=4, num_stages=1).options(),
    )  # fmt: skip
    return out


def latent_attention(
    query: Tensor,
    cache: KvCache,
    *,
    starts: Tensor,
    lengths: Tensor,
    max_queries: int,
    max_keys: int,
    form: LatentForm,
    splits: int | None = None,
) -> Tensor:
    """Mixed rows, like query [tokens, num_heads, 2 · half]. See `attention`.

    splits: parts that keys are divided in; None for as many as keep the processors busy.
    """
    check("query", query, dtypes=FLOATS, shape=(None, form.num_heads, 2 * cache.head_size))
    tokens, heads = query.shape[:2]
    for name, each in (("starts", starts), ("lengths", lengths)):
        check(name, each, dtypes=(torch.int32,), shape=(None,), like=query)
    sequences = lengths.shape[0]
    out = output("out", None, shape=query.shape, like=query)
    if not tokens or not sequences:
        return out
    rows = min(_MOST_ROWS, padded(max_queries * heads, at_least=SMALLEST_DOT))
    tiles = triton.cdiv(max_queries * heads, rows)
    splits = splits or key_splits(
        tiles=tiles * sequences, max_keys=max_keys, processors=num_processors(query.device)
    )
    partial, levels = out, lengths  # never written without splits
    if splits > 1:
        shape = (splits, tokens, heads)
        levels = torch.empty(shape, dtype=torch.float32, device=query.device)
        partial = torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device)
    table = cache.block_table
    _attend_kernel[tiles, sequences * splits](
        query, out, partial, levels, cache.keys, cache.values,
        starts if table is None else table, starts, lengths, tokens,
        cache.keys.stride(0), cache.keys.stride(2), cache.block_tokens,
        0 if table is None else table.stride(0), splits, form.scale,
        group=heads, half=cache.head_size, paged=table is not None, divides=splits > 1,
        block_rows=rows, block_keys=_KEYS,
        block_half=padded(cache.head_size, at_least=SMALLEST_DOT),
        **Launch(num_warps=8, num_stages=1).options(),
    )  # fmt: skip
    if splits > 1:
        combine(partial, levels, out, starts, num_sequences=sequences)
    return out
