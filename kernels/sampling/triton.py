"""The k highest scores of each row, found on a GPU and ranked.

A score and its id make one integer that sorts as `reference.py` ranks: by falling score, equal
scores by rising id. Each chunk of a row gives its best such keys, and so on over those, until one
chunk is left. A row with a score that is NaN or infinite has no next token: its ids are −1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.triton_launch import FLOATS, Launch, check, padded

LARGEST_TOP_K = 256
"""More takes the compiler tens of seconds, and no one asks for it."""

CHUNK = 4096
"""Scores that one program ranks; never fewer than twice the k it keeps."""

_BROKEN = tl.constexpr((1 << 63) - 1)  # no finite score has this key: above all others


@triton.jit
def _keys(scores, ids):
    """Signed 64-bit keys: the score's bits in their order above, the id counted down below."""
    wide = scores.to(tl.float32) + 0.0  # −0 becomes 0, equal to it
    bits = wide.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids), _BROKEN)


@triton.jit
def _best_kernel(
    source, best, row_stride, count, ranks: tl.constexpr, keep: tl.constexpr, chunk: tl.constexpr
):
    """best[row, program · keep …] = the `keep` largest keys of this program's part of the row.

    ranks: source holds scores, and keys are made of them; otherwise it holds keys.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * chunk + tl.arange(0, chunk)
    inside = at < count
    if ranks:
        keys = _keys(tl.load(source + row * row_stride + at, mask=inside, other=0.0), at)
    else:
        keys = tl.load(source + row * row_stride + at, mask=inside, other=0)
    keys = tl.where(inside, keys, -_BROKEN)
    start = (row * tl.num_programs(1) + part) * keep
    if keep == 1:
        tl.store(best + start, tl.max(keys, axis=0))
    else:
        tl.store(best + start + tl.arange(0, keep), tl.topk(keys, keep))


@triton.jit
def _unpack_kernel(keys, scores, ids, count, keep, block: tl.constexpr):
    """Keys back to scores and ids; those of a broken row to NaN and −1."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < count
    key = tl.load(keys + row * keep + at, mask=inside, other=0)
    broken = tl.load(keys + row * keep) == _BROKEN
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    score = tl.where(broken, float("nan"), bits.to(tl.float32, bitcast=True))
    token = tl.where(broken, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(scores + row * count + at, score, mask=inside)
    tl.store(ids + row * count + at, token, mask=inside)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] → the k best of each row: (scores float32, ids int64), both [rows, k].

    Ranked by falling score, equal scores by rising id. A row that holds a NaN or an infinity gives
    NaN and −1 throughout. Raises ValueError.
    """
    check("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    rows, vocabulary = logits.shape
    if not 0 < vocabulary < 1 << 31:
        raise ValueError(f"logits need at least one column, not the shape {list(logits.shape)}")
    if not 1 <= k <= min(LARGEST_TOP_K, vocabulary):
        raise ValueError(f"k is {k}, not 1 to {min(LARGEST_TOP_K, vocabulary)}")
    scores = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if not rows:
        return scores, ids
    options = Launch(num_warps=8, num_stages=1).options()
    keep = padded(k)
    source, stride, count, ranks = logits, logits.stride(0), vocabulary, True
    while ranks or count > keep:
        # One chunk at the end always: a chunk is at least twice what it keeps, so this shrinks.
        chunk = min(CHUNK, max(padded(count), 2 * keep))
        parts = triton.cdiv(count, chunk)
        best = torch.empty((rows, parts * keep), dtype=torch.int64, device=logits.device)
        _best_kernel[rows, parts](
            source, best, stride, count, ranks=ranks, keep=keep, chunk=chunk, **options
        )
        source, stride, count, ranks = best, parts * keep, parts * keep, False
    options = Launch(num_warps=1, num_stages=1).options()
    _unpack_kernel[(rows,)](source, scores, ids, k, keep, block=keep, **options)
    return scores, ids
