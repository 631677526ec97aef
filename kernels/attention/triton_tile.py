"""One tile of queries against one part of the keys: the kernel under `attention`.

Rows of a tile are (query, head of the group) pairs. Scores are in units of log 2, because a GPU
has 2^x and not e^x.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _eight_bits(words):
    """The codes of int8, or of int32 with four of them each, as float32."""
    if words.dtype == tl.int8:
        codes = words
    else:
        even = tl.interleave(words.to(tl.int8), (words >> 16).to(tl.int8))
        odd = tl.interleave((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
        codes = tl.interleave(even, odd)
    return codes.to(tl.float32)


@triton.jit
def _four_bits(words, dtype: tl.constexpr):
    """The codes of uint8, or of int32 in an order of its own, as `dtype`.

    The last bits of 2^7, in float16 of 2^10, count in ones: a code put there is added. So two
    numbers are made at a time, and no instruction converts. Of a word their order is that of the
    nibbles 0, 4, 1, 5, …: `attend_tile` has the columns of queries and results in it, too.
    """
    is_short: tl.constexpr = dtype == tl.bfloat16
    lane: tl.constexpr = tl.bfloat16 if is_short else tl.float16
    base: tl.constexpr = 0x43004300 if is_short else 0x64006400
    zero: tl.constexpr = 128 + 8 if is_short else 1024 + 8
    if words.dtype == tl.uint8:
        pairs = words.to(tl.int32)
        pairs = (pairs & 15) | ((pairs & 240) << 12) | base
    else:
        pairs = tl.interleave(
            tl.interleave(words, words >> 8), tl.interleave(words >> 4, words >> 12)
        )
        pairs = (pairs & 0x000F000F) | base
    low = pairs.to(tl.int16).to(lane, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(lane, bitcast=True)
    return tl.interleave(low, high).to(dtype) - tl.full((1, 1), zero, tl.float32).to(dtype)


@triton.jit
def _load_scales(scales, scale_slot, present, masked: tl.constexpr):
    """The scale [keys] of each token's head, where it has one."""
    if masked:
        scale = tl.load(scales + scale_slot, mask=present, other=0.0)
    else:
        scale = tl.load(scales + scale_slot)
    return scale.to(tl.float32)


@triton.jit
def _load_rows(
    store, scales, slot, scale_slot, present,
    head_size: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr,
    block_keys: tl.constexpr, block_head: tl.constexpr, masked: tl.constexpr,
    by_column: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys or values [keys, block_head] as `dtype`; what lies past the head or is not `present`
    is a finite number.

    slot, scale_slot [keys]: where each token's head and its scales begin. by_column: codes whose
    scale is that of their whole head come as they are.
    """
    per_word: tl.constexpr = 1 if bits == 0 else store.dtype.element_ty.primitive_bitwidth // bits
    at = tl.arange(0, block_head // per_word)
    inside = (at < head_size // per_word)[None, :]
    if masked:
        inside = inside & present[:, None]
    words = tl.load(store + slot[:, None] + at[None, :], mask=inside, other=0)
    if bits == 0:
        rows = words.to(dtype)
    else:
        rows = _eight_bits(words) if bits == 8 else _four_bits(words, dtype)
        if group_size == head_size:
            if not by_column:
                rows *= _load_scales(scales, scale_slot, present, masked).to(rows.dtype)[:, None]
        else:
            group = tl.arange(0, block_head // group_size)
            known = (group < head_size // group_size)[None, :]
            if masked:
                known = known & present[:, None]
            scale = tl.load(scales + scale_slot[:, None] + group[None, :], mask=known, other=0.0)
            grouped = tl.reshape(rows, (block_keys, block_head // group_size, group_size))
            grouped *= scale.to(rows.dtype)[:, :, None]
            rows = tl.reshape(grouped, (block_keys, block_head))
        rows = rows.to(dtype)
    return rows


@triton.jit
def _visit(
    sums, total, peak, q, begin, end, position, kv_head,
    keys, values, key_scales, value_scales, table_row, sequence,
    block_stride, head_stride, token_stride, block_tokens, num_kv_heads, bend, unit,
    head_size: tl.constexpr, window: tl.constexpr, caps: tl.constexpr, block_bits: tl.constexpr,
    bits: tl.constexpr, group_size: tl.constexpr, block_keys: tl.constexpr,
    block_head: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Go on with the running softmax over the keys begin … end − 1.

    Without `masked` they are whole blocks of keys, and every row sees all of them. Scores stay in
    units of their own: `unit` takes them to log 2 in the instruction that subtracts the peak.
    """
    groups: tl.constexpr = head_size // group_size
    # The scale of a key is that of its column of scores, and the scale of a value that of its
    # column of weights, of which a few rows have far less than the head has codes. Float16 would
    # lose small weights of small values.
    few_rows: tl.constexpr = q.shape[0] <= 16 and q.dtype != tl.float16
    by_column: tl.constexpr = bits > 0 and group_size == head_size and few_rows
    for first in range(begin, end, block_keys):
        key_at = first + tl.arange(0, block_keys)
        present = key_at < end
        if block_bits >= 0:
            # A block's number is read once for each key, from the nearest cache.
            found = tl.where(present, key_at, begin) >> block_bits
            cell = tl.load(table_row + found).to(tl.int64)
            place = key_at & ((1 << block_bits) - 1)
        else:
            cell, place = sequence, key_at
        slot = cell * block_stride + kv_head * head_stride + place.to(tl.int64) * token_stride
        scale_slot = ((cell * num_kv_heads + kv_head) * block_tokens + place) * groups
        if by_column:
            # Loads too small to be kept in flight over a turn: begun before they are needed.
            key_scale = _load_scales(key_scales, scale_slot, present, masked)
            value_scale = _load_scales(value_scales, scale_slot, present, masked)
        k = _load_rows(
            keys, key_scales, slot, scale_slot, present,
            head_size, bits, group_size, block_keys, block_head, masked,
            by_column, q.dtype,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if by_column:
            scores *= key_scale[None, :]
        if caps:
            # tanh(x) = sign(x) · (1 − e^−2|x|) / (1 + e^−2|x|): nothing overflows.
            small = tl.exp2(tl.abs(scores) * bend)
            bent = (1.0 - small) / (1.0 + small)
            scores = tl.where(scores < 0, -bent, bent)
        if masked:
            visible = present[None, :] & (key_at[None, :] <= position[:, None])
            if window > 0:
                visible = visible & (key_at[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * unit)
        # A row that has seen no key yet has the peak −inf, and −inf − −inf is no number.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * unit - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, axis=1)
        if by_column:
            weights *= value_scale[None, :]
        v = _load_rows(
            values, value_scales, slot, scale_slot, present,
            head_size, bits, group_size, block_keys, block_head, masked,
            by_column, q.dtype,
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
    sinks: tl.constexpr, block_bits: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr,
    divides: tl.constexpr, block_rows: tl.constexpr,
    block_keys: tl.constexpr, block_head: tl.constexpr,
):  # fmt: skip
    """Programs (tile of rows × KV head, sequence × part of the keys).

    The last rows see the most keys, and their programs come first: when a processor runs out of
    them, short ones are left. Unless it divides the keys, the result goes to `out`. Else each
    part's goes to `partial`, with the logarithm of its weight in `levels`. How many `splits` there
    are is no constant: it changes in the middle of a reply, and nothing may be compiled then.
    """
    num_kv_heads = num_heads // group
    kv_head = tl.program_id(0) % num_kv_heads
    row_tile = tl.num_programs(0) // num_kv_heads - 1 - tl.program_id(0) // num_kv_heads
    sequence = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    length = tl.load(lengths + sequence)
    first_query = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - first_query
    first_row = row_tile * block_rows
    if first_row >= num_queries * group:
        return
    before = length - num_queries  # keys that come before the first query
    row = first_row + tl.arange(0, block_rows)
    row_inside = row < num_queries * group
    token = row // group
    head = kv_head * group + row % group
    position = before + token
    at = tl.arange(0, block_head)
    if bits == 4 and keys.dtype.element_ty == tl.int32:
        # The order in which `_four_bits` has the codes of a word: nibbles 0, 4, 1, 5, 2, 6, 3, 7.
        at = (at & -8) | ((at & 1) << 2) | ((at >> 1) & 3)
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
    if caps:
        # Scores x · scale / soft_cap, whose tanh is then taken, are in units of soft_cap.
        bend = scale / soft_cap * (-2.0 * _LOG2_E)
        unit = soft_cap * _LOG2_E
    else:
        bend = 0.0
        unit = scale * _LOG2_E
    if window > 0:
        sums, total, peak = _visit(
            sums, total, peak, q, begin, open_begin, position, kv_head,
            keys, values, key_scales, value_scales, table_row, sequence.to(tl.int64),
            block_stride, head_stride, token_stride, block_tokens, num_kv_heads, bend, unit,
            head_size, window, caps, block_bits, bits, group_size, block_keys, block_head, True,
        )  # fmt: skip
    sums, total, peak = _visit(
        sums, total, peak, q, open_begin, open_end, position, kv_head,
        keys, values, key_scales, value_scales, table_row, sequence.to(tl.int64),
        block_stride, head_stride, token_stride, block_tokens, num_kv_heads, bend, unit,
        head_size, window, caps, block_bits, bits, group_size, block_keys, block_head, False,
    )  # fmt: skip
    sums, total, peak = _visit(
        sums, total, peak, q, open_end, end, position, kv_head,
        keys, values, key_scales, value_scales, table_row, sequence.to(tl.int64),
        block_stride, head_stride, token_stride, block_tokens, num_kv_heads, bend, unit,
        head_size, window, caps, block_bits, bits, group_size, block_keys, block_head, True,
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
