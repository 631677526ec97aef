"""Product with a weight of 2, 4 or 8 bits on a GPU, from the packed words of `gpu_layout.py`.

    y[m, n] = sum over k of x[m, k] · (code[n, k] − zero[n, b]) · scale[n, b],  b = k // block_size

Few rows (decoding) are bound by reading the weight: each word is read once, unpacked in registers
and multiplied in float32. Many rows unpack to the type of x and go through tl.dot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.matmul.triton import check_bias, split_output, store_rows, sum_splits, usual_tiles
from edge.kernels.matmul_nbits.gpu_layout import BITS_PER_WORD
from edge.kernels.matmul_nbits.reference import check_format
from edge.kernels.triton_launch import (
    FLOATS,
    GemmTiles,
    GemvTiles,
    check,
    output,
)

# A float32 with these bits is 2^23, and its lowest mantissa bit is worth 1: a code put there is
# that much more. Far cheaper than converting integers, which a GPU does few at a time.
_CODE_FLOAT_BITS = tl.constexpr(0x4B000000)
_CODE_FLOAT = tl.constexpr(8388608.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """A `GpuMatrix` as tensors: words int32 [rows, words], scales and zero points [blocks, rows].

    Raises ValueError where shapes contradict each other.
    """

    words: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    bits: int
    block_size: int
    columns: int

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)
        blocks = triton.cdiv(self.columns, self.block_size)
        words = blocks * self.block_size * self.bits // BITS_PER_WORD
        check("words", self.words, dtypes=(torch.int32,), shape=(None, words))
        shape = (blocks, self.words.shape[0])
        check("scales", self.scales, dtypes=FLOATS, shape=shape, like=self.words)
        if self.zero_points is not None:
            check(
                "zero_points", self.zero_points, dtypes=(torch.uint8,), shape=shape,
                like=self.words,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """A matrix [outputs, inputs] on a device: floats, or codes with scales and the like."""

    matrix: Tensor | PackedWeight
    offsets: Tensor | None = None
    """float32 [outputs, blocks], added to what codes stand for."""
    order: Tensor | None = None
    """int32 [inputs]: which input each column is of."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if isinstance(self.matrix, PackedWeight):
            return self.matrix.words.shape[0], self.matrix.columns
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """Words or floats, scales, zero points, offsets, order."""
        if isinstance(self.matrix, PackedWeight):
            packed = self.matrix
            return packed.words, packed.scales, packed.zero_points, self.offsets, self.order
        return self.matrix, None, None, None, None


@triton.jit
def _spread(words, step: tl.constexpr):
    """[..., n] → [..., n, 2]: each word, and the same shifted right by `step` bits."""
    return tl.join(words, words >> step)


@triton.jit
def load_codes(
    words, n, word, inside, num_words,
    bits: tl.constexpr, block_outputs: tl.constexpr, block_words: tl.constexpr,
):  # fmt: skip
    """Codes as float32, still 2^23 too large: [outputs, words · codes of a word].

    Halves are joined, not indexed: then each thread unpacks the words that it loaded, and nothing
    passes through shared memory.
    """
    packed = tl.load(
        words + n.to(tl.int64)[:, None] * num_words + word[None, :], mask=inside, other=0
    )
    spread = _spread(_spread(packed, 16), 8)
    if bits <= 4:
        spread = _spread(spread, 4)
    if bits == 2:
        spread = _spread(spread, 2)
    codes = tl.reshape(spread, (block_outputs, block_words * (32 // bits)))
    return ((codes & ((1 << bits) - 1)) | _CODE_FLOAT_BITS).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(
    scales, zero_points, n, word, inside, num_outputs,
    bits: tl.constexpr, block_size: tl.constexpr, has_zeros: tl.constexpr,
):  # fmt: skip
    """[outputs, words]: the scale of each word, and what to take from its codes as loaded."""
    block = (word * (32 // bits) // block_size).to(tl.int64)
    place = block[None, :] * num_outputs + n[:, None]
    scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
    if has_zeros:
        zero = tl.load(zero_points + place, mask=inside, other=0).to(tl.float32) + _CODE_FLOAT
    else:
        zero = tl.full(scale.shape, _CODE_FLOAT + (1 << (bits - 1)), dtype=tl.float32)
    return scale, zero


@triton.jit
def each_code(of_word, bits: tl.constexpr, outputs: tl.constexpr, words: tl.constexpr):
    """[outputs, words] → [outputs, words · codes of a word], each value repeated."""
    spread = tl.join(of_word, of_word)
    spread = tl.join(spread, spread)
    if bits <= 4:
        spread = tl.join(spread, spread)
    if bits == 2:
        spread = tl.join(spread, spread)
    return tl.reshape(spread, (outputs, words * (32 // bits)))


@triton.jit
def _row_products(
    x, value, first, num_inputs,
    per_word: tl.constexpr, block_outputs: tl.constexpr, block_words: tl.constexpr,
):  # fmt: skip
    """One row of x times each weight, summed within each word: [outputs, words]."""
    k = first * per_word + tl.arange(0, block_words * per_word)
    a = tl.load(x + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    products = tl.reshape(value * a[None, :], (block_outputs, block_words, per_word))
    return tl.sum(products, axis=2)


@triton.jit
def _gemv_kernel(
    x, words, scales, zero_points, bias, out, num_outputs, num_inputs, num_words,
    num_rows: tl.constexpr, bits: tl.constexpr, block_size: tl.constexpr,
    has_zeros: tl.constexpr, biased: tl.constexpr,
    block_outputs: tl.constexpr, block_words: tl.constexpr,
):  # fmt: skip
    """All rows of x, at most four, times `block_outputs` rows of the weight."""
    per_word: tl.constexpr = 32 // bits
    n = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    n_inside = n < num_outputs
    sums_0 = tl.zeros((block_outputs, block_words), dtype=tl.float32)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    for first in range(0, num_words, block_words):
        word = first + tl.arange(0, block_words)
        inside = n_inside[:, None] & (word < num_words)[None, :]
        codes = load_codes(words, n, word, inside, num_words, bits, block_outputs, block_words)
        scale, zero = load_scales(
            scales, zero_points, n, word, inside, num_outputs, bits, block_size, has_zeros
        )
        value = codes - each_code(zero, bits, block_outputs, block_words)
        sums_0 += scale * _row_products(
            x, value, first, num_inputs, per_word, block_outputs, block_words
        )
        if num_rows > 1:
            sums_1 += scale * _row_products(
                x + num_inputs, value, first, num_inputs, per_word, block_outputs, block_words
            )
        if num_rows > 2:
            sums_2 += scale * _row_products(
                x + 2 * num_inputs, value, first, num_inputs, per_word, block_outputs, block_words
            )
        if num_rows > 3:
            sums_3 += scale * _row_products(
                x + 3 * num_inputs, value, first, num_inputs, per_word, block_outputs, block_words
            )
    store_rows(
        out, sums_0, sums_1, sums_2, sums_3, bias, n, num_outputs, num_rows, biased
    )  # fmt: skip


@triton.jit
def _gemm_kernel(
    x, words, scales, zero_points, bias, out,
    num_rows, num_outputs, num_inputs, num_words, split_words,
    bits: tl.constexpr, block_size: tl.constexpr, has_zeros: tl.constexpr, biased: tl.constexpr,
    block_rows: tl.constexpr, block_outputs: tl.constexpr, block_words: tl.constexpr,
):  # fmt: skip
    """One tile of the product of the words of program axis 2, into that axis of `out`."""
    per_word: tl.constexpr = 32 // bits
    block_inputs: tl.constexpr = block_words * per_word
    m = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    n = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    split = tl.program_id(2)
    m_inside, n_inside = m < num_rows, n < num_outputs
    x_row = m.to(tl.int64) * num_inputs
    begin = split * split_words
    sums = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
    for first in range(begin, tl.minimum(begin + split_words, num_words), block_words):
        word = first + tl.arange(0, block_words)
        inside = n_inside[:, None] & (word < num_words)[None, :]
        codes = load_codes(words, n, word, inside, num_words, bits, block_outputs, block_words)
        scale, zero = load_scales(
            scales, zero_points, n, word, inside, num_outputs, bits, block_size, has_zeros
        )
        value = codes - each_code(zero, bits, block_outputs, block_words)
        w = (value * each_code(scale, bits, block_outputs, block_words)).to(x.dtype.element_ty)
        k = first * per_word + tl.arange(0, block_inputs)
        a = tl.load(
            x + x_row[:, None] + k[None, :],
            mask=m_inside[:, None] & (k < num_inputs)[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(a, tl.trans(w), sums, input_precision="ieee")
    if biased:
        sums += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * num_rows + m.to(tl.int64)) * num_outputs
    tl.store(
        out + place[:, None] + n[None, :], sums.to(out.dtype.element_ty),
        mask=m_inside[:, None] & n_inside[None, :],
    )  # fmt: skip


def matmul_nbits(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tiles: GemvTiles | GemmTiles | None = None,
) -> Tensor:
    """x [..., columns], weight [rows, columns], bias [rows] → [..., rows].

    The result has the type of x unless `out` has another. The kind of `tiles` chooses the kernel;
    without them the number of rows of x does. Raises ValueError.
    """
    check("x", x, dtypes=FLOATS, like=weight.words)
    num_outputs, num_words = weight.words.shape
    if not x.ndim or x.shape[-1] != weight.columns:
        raise ValueError(f"x has the shape {list(x.shape)}, the weight {weight.columns} columns")
    check_bias(bias, num_outputs, x)
    out = output("out", out, shape=(*x.shape[:-1], num_outputs), like=x)
    if not out.numel():
        return out
    rows = out.numel() // num_outputs
    tiles = tiles or usual_tiles(x, rows, num_outputs, gemv_inputs=1024)
    per_word = BITS_PER_WORD // weight.bits
    block_words = tiles.inputs // per_word
    zeros = weight.zero_points
    packed = (weight.words, weight.scales, weight.words if zeros is None else zeros)
    if isinstance(tiles, GemvTiles):
        _gemv_kernel[(triton.cdiv(num_outputs, tiles.outputs),)](
            x, *packed, x if bias is None else bias, out, num_outputs, weight.columns, num_words,
            num_rows=rows, bits=weight.bits, block_size=weight.block_size,
            has_zeros=zeros is not None, biased=bias is not None,
            block_outputs=tiles.outputs, block_words=block_words, **tiles.launch.options(),
        )  # fmt: skip
        return out
    target, target_bias = split_output(out, bias, tiles.splits)
    split_words = triton.cdiv(triton.cdiv(num_words, tiles.splits), block_words) * block_words
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs), tiles.splits)
    _gemm_kernel[grid](
        x, *packed, x if target_bias is None else target_bias, target,
        rows, num_outputs, weight.columns, num_words, split_words,
        bits=weight.bits, block_size=weight.block_size, has_zeros=zeros is not None,
        biased=target_bias is not None, block_rows=tiles.rows, block_outputs=tiles.outputs,
        block_words=block_words, **tiles.launch.options(),
    )  # fmt: skip
    if tiles.splits > 1:
        sum_splits(target, bias, out)
    return out
