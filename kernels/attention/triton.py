"""Grouped-query attention on a GPU over any `KvCache`: whole prompts, chunks of them, and decoding.

FlashAttention-2 (Dao, 2023): keys pass by in blocks, the softmax is kept as a running peak and sum,
and nothing of the size of the scores reaches memory. The query heads that share a KV head lie in
one tile, so each key is read once for all of them. With few queries the keys are divided among
programs too (split-K), whose results a second kernel puts together: in one order, so that the same
input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.attention.triton_tile import attend_tile
from edge.kernels.kv_cache.gpu_cache import KvCache
from edge.kernels.triton_launch import (
    FLOATS,
    SMALLEST_DOT,
    SMALLEST_SHARED_MEMORY,
    Launch,
    check,
    num_processors,
    output,
    padded,
    shared_memory,
)

_PROGRAMS, _DECODING_PROGRAMS = 2, 3
"""Programs of one processor, where keys are divided."""
_KEYS, _DECODING_KEYS = 256, 128
"""Fewest keys of a part."""
_MOST_SPLITS = 64
_MANY_ROWS = 512
_MUCH_MEMORY = 200 << 10
"""Bytes of shared memory that only GPUs of data centres have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """Rows (queries × heads of a group) and keys of one tile, and parts the keys are divided in.

    splits: None for as many as keep the processors busy.
    """

    rows: int = 64
    keys: int = 64
    splits: int | None = None
    launch: Launch = field(default_factory=Launch)


def attention_tiles(
    *,
    max_queries: int,
    group: int,
    head_size: int,
    element_bytes: int = 2,
    memory: int = SMALLEST_SHARED_MEMORY,
) -> AttentionTiles:
    """Tiles for sequences of at most that many queries; group: query heads of one KV head.

    memory: bytes of shared memory that a program may have. Few rows are bound by memory: programs
    of two warps hold two tiles of keys in flight. Many are bound by products, of which two groups
    of four warps do more for each key that they read.
    """
    rows = padded(max_queries * group, at_least=SMALLEST_DOT)
    if head_size <= 128 and element_bytes <= 2:
        if rows == SMALLEST_DOT:
            return AttentionTiles(rows=rows, launch=Launch(num_warps=2, num_stages=3))
        if rows >= _MANY_ROWS and memory >= _MUCH_MEMORY:
            return AttentionTiles(rows=128, launch=Launch(num_warps=8, num_stages=3))
    # Wider rows take more registers and memory, and float32 has no tensor cores here.
    launch = Launch(num_warps=8 if head_size > 128 else 4, num_stages=2)
    return AttentionTiles(rows=min(64, rows), launch=launch)


def key_splits(
    *,
    tiles: int,
    max_keys: int,
    processors: int,
    programs: int = _PROGRAMS,
    fewest_keys: int = _KEYS,
) -> int:
    """Into how many parts keys are divided: only when the tiles alone leave processors idle.

    programs: of one processor. And never so far that a part is a few tiles of keys.
    """
    wanted = triton.cdiv(programs * processors, max(1, tiles))
    return max(1, int(min(wanted, max_keys // fewest_keys, _MOST_SPLITS)))


@triton.jit(do_not_specialize=["num_splits", "num_sequences", "num_tokens"])
def _combine_kernel(
    partial, levels, out, starts, num_sequences, num_tokens, num_heads, num_splits,
    block_splits: tl.constexpr,
    head_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """out = sum of 2^level · partial / sum of 2^level, over the parts of the keys."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(starts + num_sequences):
        return
    head = tl.program_id(1)
    split = tl.arange(0, block_splits)
    at = tl.arange(0, block)
    row = (split.to(tl.int64) * num_tokens + token) * num_heads + head
    level = tl.load(levels + row, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(level, axis=0)
    weight = tl.exp2(level - tl.where(peak == float("-inf"), 0.0, peak))
    inside = (split < num_splits)[:, None] & (at < head_size)[None, :]
    parts = tl.load(partial + row[:, None] * head_size + at[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, axis=0)
    result = tl.sum(parts * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    start = out + (token * num_heads + head) * head_size
    tl.store(start + at, result.to(out.dtype.element_ty), mask=at < head_size)


def attention(
    query: Tensor,
    cache: KvCache,
    *,
    starts: Tensor,
    lengths: Tensor,
    max_queries: int,
    max_keys: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """Causal attention of several sequences' queries, whose own keys are in the cache already.

    query [tokens, num_heads, head_size], sequence after sequence, which may be a slice of a packed
    product → [tokens, num_heads, head_size]. starts int32 [sequences + 1] begins with 0: sequence
    s has the queries starts[s] … starts[s + 1] − 1. lengths int32 [sequences]: its keys; the
    last one belongs to its last query. max_queries, max_keys: bounds on both, known without asking
    the GPU (max_keys: the capacity of the cache if it is not given). Decoding is max_queries = 1.

    scale, window, soft_cap and sinks [num_heads] as in `reference.py`. Rows past starts[−1] stay as
    they are. Raises ValueError.
    """
    check("query", query, dtypes=FLOATS, shape=(None, None, None), contiguous=False)
    num_tokens, num_heads, head_size = query.shape
    num_sequences = _check_sequences(query, cache, starts, lengths)
    if head_size != cache.head_size or not num_heads or num_heads % cache.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads of {head_size} do not go with {cache.num_kv_heads} KV heads "
            f"of {cache.head_size}"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys shows none; pass at least 1, or None")
    scale = head_size**-0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale is {scale}, not above 0")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, not above 0")
    if sinks is not None:
        check("sinks", sinks, dtypes=FLOATS, shape=(num_heads,), like=query)
    out = output("out", out, shape=query.shape, like=query)
    if not num_tokens or not num_sequences or max_queries < 1:
        return out
    group = num_heads // cache.num_kv_heads
    tiles = tiles or attention_tiles(
        max_queries=max_queries, group=group, head_size=head_size,
        element_bytes=query.element_size(), memory=shared_memory(query.device),
    )  # fmt: skip
    row_tiles = triton.cdiv(max_queries * group, tiles.rows)
    decodes = tiles.rows == SMALLEST_DOT
    splits = tiles.splits or key_splits(
        tiles=row_tiles * num_sequences * cache.num_kv_heads,
        max_keys=cache.capacity if max_keys is None else max_keys,
        processors=num_processors(query.device),
        programs=_DECODING_PROGRAMS if decodes else _PROGRAMS,
        fewest_keys=_DECODING_KEYS if decodes else _KEYS,
    )
    partial, levels = out, lengths  # never written without splits
    if splits > 1:
        shape = (splits, num_tokens, num_heads)
        levels = torch.empty(shape, dtype=torch.float32, device=query.device)
        partial = torch.empty((*shape, head_size), dtype=torch.float32, device=query.device)
    table = cache.block_table
    keys, values = _stores(cache)
    scales = (cache.keys, cache.values)  # never read in a float cache
    if cache.key_scales is not None and cache.value_scales is not None:
        scales = (cache.key_scales, cache.value_scales)
    attend_tile[row_tiles * cache.num_kv_heads, num_sequences * splits](
        query, out, partial, levels, keys, values, *scales,
        starts if table is None else table, starts, lengths, query if sinks is None else sinks,
        num_tokens, num_heads, query.stride(0), query.stride(1), *keys.stride()[:3],
        cache.block_tokens, 0 if table is None else table.stride(0), splits,
        soft_cap or 1.0, scale,
        group=group, head_size=head_size, window=window or 0, caps=soft_cap is not None,
        sinks=sinks is not None, bits=cache.bits or 0,
        block_bits=-1 if table is None else cache.block_tokens.bit_length() - 1,
        group_size=cache.group_size, divides=splits > 1,
        block_rows=tiles.rows, block_keys=tiles.keys,
        block_head=padded(head_size, at_least=SMALLEST_DOT),
        **_launch(tiles, is_paged=table is not None).options(),
    )  # fmt: skip
    if splits > 1:
        combine(partial, levels, out, starts, num_sequences=num_sequences)
    return out


def combine(
    partial: Tensor, levels: Tensor, out: Tensor, starts: Tensor, *, num_sequences: int
) -> None:
    """Put the results for parts of the keys [splits, tokens, num_heads, head_size] together in
    `out`. levels [splits, tokens, num_heads]: logarithms of their weights."""
    splits, num_tokens, num_heads, head_size = partial.shape
    _combine_kernel[num_tokens, num_heads](
        partial, levels, out, starts, num_sequences, num_tokens, num_heads, splits,
        block_splits=padded(max(splits, _MOST_SPLITS)), head_size=head_size,
        block=padded(head_size), **Launch(num_stages=1).options(),
    )  # fmt: skip


def _launch(tiles: AttentionTiles, *, is_paged: bool) -> Launch:
    """The compiler divides stages among loads and the lookups that they wait for, whose numbers
    are those of blocks: twice as many turns keep as many keys in flight."""
    if not is_paged:
        return tiles.launch
    return replace(tiles.launch, num_stages=2 * tiles.launch.num_stages - 1)


def _stores(cache: KvCache) -> tuple[Tensor, Tensor]:
    """Keys and values: codes in words of 32 bits, where heads are whole ones."""
    stores = cache.keys, cache.values
    sizes = (cache.keys.shape[-1], *cache.keys.stride()[:3], *(x.storage_offset() for x in stores))
    if cache.bits is None or any(size % 4 for size in sizes):
        return stores
    return cache.keys.view(torch.int32), cache.values.view(torch.int32)


def _check_sequences(query: Tensor, cache: KvCache, starts: Tensor, lengths: Tensor) -> int:
    check("cache.keys", cache.keys, dtypes=(cache.keys.dtype,), like=query, contiguous=False)
    check("lengths", lengths, dtypes=(torch.int32,), shape=(None,), like=query)
    num_sequences: int = lengths.shape[0]
    check("starts", starts, dtypes=(torch.int32,), shape=(num_sequences + 1,), like=query)
    if num_sequences > cache.num_sequences:
        raise ValueError(f"{num_sequences} sequences, but a cache of {cache.num_sequences}")
    return num_sequences
