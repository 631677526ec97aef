"""One tile of queries against one part of the keys: the kernel under `attention`.

Rows of a tile are (query, head of the group) pairs. Scores are in units of log 2, because a GPU
has 2^x and not e^x.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(
    store, scales, slot, scale_slot, present,
    head_size: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr,
    block_keys: tl.constexpr, block_head: tl.constexpr, masked: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys or values [keys, block_head] as `dtype`; zeros past the head and where not `present`.

    slot, scale_slot [keys]: where each token's head and its scales begin.
    """
    at = tl.arange(0, block_head)
    inside = (at < head_size)[None, :]
    if masked:
        inside = inside & present[:, None]
    if bits == 0:
        rows = tl.load(store + slot[:, None] + at[None, :], mask=inside, other=0.0).to(dtype)
    else:
        if bits == 8:
            codes = tl.load(store + slot[:, None] + at[None, :], mask=inside, other=0)
            values = codes.to(tl.float32)
        else:
            byte = tl.arange(0, block_head // 2)
            bytes_inside = (byte < head_size // 2)[None, :]
            if masked:
                bytes_inside = bytes_inside & present[:, None]
            packed = tl.load(store + slot[:, None] + byte[None, :], mask=bytes_inside, other=0)
            low = (packed & 15).to(tl.float32)
            high = (packed >> 4).to(tl.float32)
            values = tl.interleave(low, high) - 8.0
        if group_size == head_size:
            if masked:
                scale = tl.load(scales + scale_slot, mask=present, other=0.0)
            else:
                scale = tl.load(scales + scale_slot)
            values *= scale.to(tl.float32)[:, None]
        else:
            group = tl.arange(0, block_head // group_size)
            known = (group * group_size < head_size)[None, :]
            if masked:
                known = known & present[:, None]
            scale = tl.load(scales + scale_slot[:, None] + group[None, :], mask=known, other=0.0)
            grouped = tl.reshape(values, (block_keys, block_head // group_size, group_size))
            grouped *= scale.to(tl.float32)[:, :, None]
            values = tl.reshape(grouped, (block_keys, block_head))
        rows = values.to(dtype)
    return rows


@triton.jit
def _visit(
    sums, total, peak, q, begin, end, position, kv_head,
    keys, values, key_scales, value_scales, table_row, sequence,
    block_stride, head_stride, token_stride, block_tokens, num_kv_heads, soft_cap, scale,
    head_size: tl.constexpr, window: tl.constexpr, caps: tl.constexpr, paged: tl.constexpr,
    bits: tl.constexpr, group_size: tl.constexpr, block_keys: tl.constexpr,
    block_head: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Go on with the running softmax over the keys begin … end − 1.

    Without `masked` they are whole blocks of keys, and every row sees all of them.
    """
    groups: tl.constexpr = head_size // group_size
    for first in range(begin, end, block_keys):
        key_at = first + tl.arange(0, block_keys)
        present = key_at < end
        if paged:
            # A block's number is read once for each key, from the nearest cache.
            found = tl.where(present, key_at, begin) // block_tokens
            cell = tl.load(table_row + found).to(tl.int64)
            place = key_at % block_tokens
        else:
            cell, place = sequence, key_at
        slot = cell * block_stride + kv_head * head_stride + place.to(tl.int64) * token_stride
        scale_slot = ((cell * num_kv_heads + kv_head) * block_tokens + place) * groups
        k = _load_rows(
            keys, key_scales, slot, scale_slot, present,
            head_size, bits, group_size, block_keys, block_head, masked, q.dtype,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if caps:
            # tanh(x) = sign(x) · (1 − e^−2|x|) / (1 + e^−2|x|): nothing overflows.
            ratio = scores / soft_cap
            small = tl.exp(-2.0 * tl.abs(ratio))
            bent = soft_cap * (1.0 - small) / (1.0 + small)
            scores = tl.where(ratio < 0, -bent, bent)
        scores *= _LOG2_E
        if masked:
            visible = present[None, :] & (key_at[None, :] <= position[:, None])
            if window > 0:
                visible = visible & (key_at[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen no key yet has the peak −inf, and −inf − −inf is no number.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, axis=1)
        v = _load_rows(
            values, value_scales, slot, scale_slot, present,
            head_size, bits, group_size, block_keys, block_head, masked, q.dtype,
        )  # fmt: skip
        sums = tl.dot(weights.to(q.dtype), v, sums * fade[:, None], input_precision="ieee")
        peak = new_peak
    return sums, total, peak


@triton.jit(do_not_specialize=["splits", "num_tokens"])
def attend_tile(
    query, out, partial, levels, keys, values, key_scales, value_scales, table, starts, lengths,
    sink_scores, num_tokens, num_heads, query_stride, query_head_stride,
    block_stride, head_stride, token_stride, block_tokens, table_stride, splits, soft_cap, scale,
    group: tl.constexpr, head_size: tl.constexpr, window: tl.constexpr, caps: tl.constexpr,
    sinks: tl.constexpr, paged: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr,
    divides: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    block_head: tl.constexpr,
):  # fmt: skip
    """Programs (tile of rows, KV head, sequence × part of the keys).

    Unless it divides the keys, the result goes to `out`. Else each part's goes to `partial`, with
    the logarithm of its weight in `levels`. How many `splits` there are is no constant: it changes
    in the middle of a reply, and nothing may be compiled then.
    """
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    first_query = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - first_query
    first_row = tl.program_id(0) * block_rows
    if first_row >= num_queries * group:
        return
    before = tl.load(lengths + sequence) - num_queries  # keys that come before the first query
    row = first_row + tl.arange(0, block_rows)
    row_inside = row < num_queries * group
    token = row // group
    head = kv_head * group + row % group
    position = before + token
    at = tl.arange(0, block_head)
    inside = row_inside[:, None] & (at < head_size)[None, :]
    token_at = (first_query + token).to(tl.int64)
    q = tl.load(
        query + token_at[:, None] * query_stride + head[:, None] * query_head_stride + at[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip

    # Keys of this tile: [begin, end). Of those, every row sees [open_begin, open_end) whole.
    first_position = before + first_row // group
    last_row = tl.minimum(first_row + block_rows, num_queries * group) - 1
    last_position = before + last_row // group
    end = last_position + 1
    begin = 0
    if window > 0:
        begin = tl.maximum(first_position - window + 1, 0) // block_keys * block_keys
    if divides:
        part = tl.cdiv(tl.cdiv(end - begin, splits), block_keys) * block_keys
        begin += split * part
        end = tl.minimum(begin + part, end)
    open_end = tl.minimum(first_position + 1, end) // block_keys * block_keys
    open_begin = begin
    if window > 0:
        fully_seen = tl.maximum(last_position - window + 1, begin)
        open_begin = tl.minimum(tl.cdiv(fully_seen, block_keys) * block_keys, end)
    open_end = tl.maximum(open_end, open_begin)

    sums = tl.zeros((block_rows, block_head), dtype=tl.float32)
    total = tl.zeros((block_rows,), dtype=tl.float32)
    peak = tl.full((block_rows,), float("-inf"), dtype=tl.float32)
    if sinks:
        # A sink is a score like others, of a value of zeros; the first part of the keys sees it.
        sink = tl.load(sink_scores + head, mask=row_inside, other=0.0).to(tl.float32)
        peak = tl.where(split == 0, sink * _LOG2_E, peak)
        total = tl.where(split == 0, 1.0, total)
    table_row = table + sequence.to(tl.int64) * table_stride
    num_kv_heads = num_heads // group
    if window > 0:
        sums, total, peak = _visit(
            sums, total, peak, q, begin, open_begin, position, kv_head,
            keys, values, key_scales, value_scales, table_row, sequence.to(tl.int64),
            block_stride, head_stride, token_stride, block_tokens, num_kv_heads, soft_cap, scale,
            head_size, window, caps, paged, bits, group_size, block_keys, block_head, True,
        )  # fmt: skip
    sums, total, peak = _visit(
        sums, total, peak, q, open_begin, open_end, position, kv_head,
        keys, values, key_scales, value_scales, table_row, sequence.to(tl.int64),
        block_stride, head_stride, token_stride, block_tokens, num_kv_heads, soft_cap, scale,
        head_size, window, caps, paged, bits, group_size, block_keys, block_head, False,
    )  # fmt: skip
    sums, total, peak = _visit(
        sums, total, peak, q, open_end, end, position, kv_head,
        keys, values, key_scales, value_scales, table_row, sequence.to(tl.int64),
        block_stride, head_stride, token_stride, block_tokens, num_kv_heads, soft_cap, scale,
        head_size, window, caps, paged, bits, group_size, block_keys, block_head, True,
    )  # fmt: skip

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if not divides:
        place = (token_at[:, None] * num_heads + head[:, None]) * head_size + at[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    else:
        slot = (split.to(tl.int64) * num_tokens + token_at) * num_heads + head
        tl.store(partial + slot[:, None] * head_size + at[None, :], result, mask=inside)
        known = tl.where(total == 0.0, 1.0, total)
        level = tl.where(total == 0.0, float("-inf"), peak + tl.log2(known))
        tl.store(levels + slot, level, mask=row_inside)
