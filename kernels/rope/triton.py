"""Rotary position embedding of a packed QKV product on its way to the KV cache, on a GPU.

Partial embeddings rotate the first elements of a head, two for each column of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.kv_cache.gpu_cache import KvCache
from edge.kernels.kv_cache.token_cache import LARGEST_CODE
from edge.kernels.triton_launch import FLOATS, INTEGERS, Launch, check, output, padded


@triton.jit
def _gained(row, at, inside, weight, norms: tl.constexpr):
    """The elements `at` of a row as float32, times their weight if there is a norm."""
    value = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    if norms:
        value *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _rotated(
    row, weight, epsilon, cos, sin, position, at,
    head_size: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr, norms: tl.constexpr,
):  # fmt: skip
    """One head, normed if asked to, rotated: float32 at the places `at`, zeros past its end."""
    inside = at < head_size
    turns = at < 2 * half
    if interleaved:
        is_first = at % 2 == 0
        pair = at // 2
        other = tl.where(is_first, at + 1, at - 1)
    else:
        is_first = at < half
        pair = tl.where(is_first, at, at - half)
        other = tl.where(is_first, at + half, at - half)
    value = _gained(row, at, inside, weight, norms)
    partner = _gained(row, other, turns, weight, norms)
    angle = position * half + pair
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    result = value * c + tl.where(is_first, -partner, partner) * s
    if norms:  # the rms is one number of the whole head: it may be divided by at the end
        plain = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        result *= 1.0 / tl.sqrt(tl.sum(plain * plain, axis=0) / head_size + epsilon)
    return result


@triton.jit
def _store_head(
    value, store, scales, slot, scale_slot, at,
    head_size: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr,
    largest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write one head of one token, rounded to codes where `bits` says so (0: a float cache)."""
    inside = at < head_size
    if bits == 0:
        tl.store(store + slot + at, value.to(store.dtype.element_ty), mask=inside)
    else:
        group_block: tl.constexpr = block if group_size == head_size else group_size
        groups: tl.constexpr = block // group_block
        grouped = tl.reshape(value, (groups, group_block))
        scale = tl.max(tl.abs(grouped), axis=1) / largest
        scale = scale.to(scales.dtype.element_ty)
        step = scale.to(tl.float32)
        inverse = tl.where(step > 0, 1.0 / tl.where(step > 0, step, 1.0), 0.0)
        code = tl.floor(grouped * inverse[:, None] + 0.5)
        # A scale that its type rounded down would lift the peak past the last code.
        code = tl.minimum(tl.maximum(code, -largest), largest).to(tl.int32)
        group = tl.arange(0, groups)
        tl.store(scales + scale_slot + group, scale, mask=group * group_size < head_size)
        if bits == 8:
            flat = tl.reshape(code, (block,))
            tl.store(store + slot + at, flat.to(tl.int8), mask=inside)
        else:
            pairs = tl.reshape(code + 8, (block // 2, 2))
            low, high = tl.split(pairs)
            byte = tl.arange(0, block // 2)
            packed = (low | (high << 4)).to(tl.uint8)
            tl.store(store + slot + byte, packed, mask=byte < head_size // 2)


@triton.jit
def _rope_store_kernel(
    qkv, query, keys, values, key_scales, value_scales, table, cos, sin, positions, sequences,
    query_norm, key_norm, epsilon, qkv_stride, num_heads, gates, num_kv_heads, capacity, angles,
    block_stride, head_stride, token_stride, block_tokens, table_stride,
    head_size: tl.constexpr, half: tl.constexpr, interleaved: tl.constexpr, norms: tl.constexpr,
    value_norm: tl.constexpr, paged: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr,
    largest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One head of one token's packed query, key and value: rotate, then to `query` or the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, block)
    position = tl.load(positions + token).to(tl.int64)
    if (position < 0) | (position >= capacity) | (position >= angles):
        return
    row = qkv + token * qkv_stride + (head + tl.where(head < num_heads, 0, gates)) * head_size
    if head < num_heads:
        rotated = _rotated(
            row, query_norm, epsilon, cos, sin, position, at, head_size, half, interleaved, norms
        )  # fmt: skip
        start = query + (token * num_heads + head) * head_size
        tl.store(start + at, rotated.to(query.dtype.element_ty), mask=at < head_size)
        return
    sequence = tl.load(sequences + token).to(tl.int64)
    if paged:
        cell = tl.load(table + sequence * table_stride + position // block_tokens).to(tl.int64)
        place = position % block_tokens
    else:
        cell, place = sequence, position
    groups: tl.constexpr = head_size // group_size
    kv_head = (head - num_heads) % num_kv_heads
    slot = cell * block_stride + kv_head * head_stride + place * token_stride
    scale_slot = ((cell * num_kv_heads + kv_head) * block_tokens + place) * groups
    if head < num_heads + num_kv_heads:
        rotated = _rotated(
            row, key_norm, epsilon, cos, sin, position, at, head_size, half, interleaved, norms
        )  # fmt: skip
        _store_head(
            rotated, keys, key_scales, slot, scale_slot, at,
            head_size, bits, group_size, largest, block,
        )  # fmt: skip
    else:
        value = tl.load(row + at, mask=at < head_size, other=0.0).to(tl.float32)
        if value_norm:
            value *= 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / head_size + epsilon)
        _store_head(
            value, values, value_scales, slot, scale_slot, at,
            head_size, bits, group_size, largest, block,
        )  # fmt: skip


def rope_store(
    qkv: Tensor,
    cache: KvCache,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor,
    sequences: Tensor,
    interleaved: bool = False,
    gated: bool = False,
    norms: tuple[Tensor, Tensor] | None = None,
    value_norm: bool = False,
    epsilon: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Norm (if asked to) and rotate queries and keys; write keys and values into the cache.

    qkv [tokens, (num_heads + 2 · num_kv_heads) · head_size] → query [tokens, num_heads, head_size].
    positions and sequences, int [tokens], say where in the cache a token belongs. norms are the
    weights [head_size] of the queries' and the keys' RMSNorm; that of values has none. A token
    whose position is negative, past the cache or past the tables is left out: nothing is written of
    it, and its row of the result stays as it is. gated: behind the queries are as many columns of
    gates, which nothing is done with. Raises ValueError.
    """
    check("qkv", qkv, dtypes=FLOATS, shape=(None, None), like=cache.keys, contiguous=False)
    tokens, width = qkv.shape
    head_size, num_kv_heads = cache.head_size, cache.num_kv_heads
    num_heads, rest = divmod(width - 2 * num_kv_heads * head_size, (1 + gated) * head_size)
    if num_heads < 1 or rest:
        raise ValueError(
            f"qkv has {width} columns, not a query, {num_kv_heads} keys and as many values "
            f"of {head_size}"
        )
    half = _check_tables(cos, sin, head_size, qkv)
    for name, index in (("positions", positions), ("sequences", sequences)):
        check(name, index, dtypes=INTEGERS, shape=(tokens,), like=qkv)
    query_norm, key_norm = norms or (qkv, qkv)
    if norms is not None:
        for name, weight in (("norms[0]", query_norm), ("norms[1]", key_norm)):
            check(name, weight, dtypes=FLOATS, shape=(head_size,), like=qkv)
    query = output("out", out, shape=(tokens, num_heads, head_size), like=qkv)
    if not tokens:
        return query
    table = cache.block_table
    scales = (cache.keys, cache.values)  # never read in a float cache
    if cache.key_scales is not None and cache.value_scales is not None:
        scales = (cache.key_scales, cache.value_scales)
    _rope_store_kernel[tokens, num_heads + 2 * num_kv_heads](
        qkv, query, cache.keys, cache.values, *scales, sequences if table is None else table,
        cos, sin, positions, sequences, query_norm, key_norm, epsilon,
        qkv.stride(0), num_heads, num_heads * gated, num_kv_heads, cache.capacity, cos.shape[0],
        *cache.keys.stride()[:3], cache.block_tokens, 0 if table is None else table.stride(0),
        head_size=head_size, half=half, interleaved=interleaved, norms=norms is not None,
        value_norm=value_norm,
        paged=table is not None, bits=cache.bits or 0, group_size=cache.group_size,
        largest=LARGEST_CODE.get(cache.bits or 0, 0), block=padded(head_size, at_least=2),
        **Launch(num_warps=1, num_stages=1).options(),
    )  # fmt: skip
    return query


def _check_tables(cos: Tensor, sin: Tensor, head_size: int, like: Tensor) -> int:
    """Half of the elements of a head that are rotated."""
    check("cos", cos, dtypes=(torch.float32,), shape=(None, None), like=like)
    check("sin", sin, dtypes=(torch.float32,), shape=cos.shape, like=like)
    half: int = cos.shape[1]
    if 2 * half > head_size:
        raise ValueError(
            f"cos and sin of {half} columns rotate {2 * half} elements; a head has {head_size}"
        )
    return half
