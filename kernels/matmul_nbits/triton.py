"""Product with a weight of 2, 4 or 8 bits on a GPU, from the packed words of `gpu_layout.py`.

    y[m, n] = sum over k of x[m, k] · (code[n, k] − zero[n, b]) · scale[n, b],  b = k // block_size

Up to 128 rows a tile of the weight is unpacked in registers and multiplied by tensor cores as it
is, [outputs, inputs] · [inputs, rows]: codes are whole numbers, which 16-bit floats hold exactly,
and scales come after the sums of their blocks. So 64 rows cost half as much again as one (H200, a
first form of the kernel). The inputs are divided among programs, whose parts are summed in one
order: the same input gives the same bits. Of more rows the weight is unpacked to the type of x,
some outputs at a time, and multiplied by the library of the GPU's maker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge.kernels.matmul.triton import matmul
from edge.kernels.matmul_nbits.gpu_layout import WORDS, num_tiles, tile_inputs
from edge.kernels.matmul_nbits.reference import check_format
from edge.kernels.triton_launch import (
    FLOATS,
    SMALLEST_DOT,
    Launch,
    cache_bytes,
    check,
    num_processors,
    output,
    padded,
)

MOST_TILED_ROWS = 128
"""Rows beyond which the weight is unpacked, which pays for 2,048; from where on is not measured."""

_UNPACKED_BYTES = 32 << 20
"""Most of a weight at a time, and of a GPU's cache half: so it is read back from there."""

_UNIT = tl.constexpr(64.0)
"""Unpacked codes are so many times too small."""

_SUM_BLOCK = 1024
_OUTPUTS = 128
_PROGRAMS_PER_PROCESSOR = 4
_FEWEST_SPLIT_TILES = 4
_MOST_SPLITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiles:
    """A program's outputs and rows, and the parts that the inputs are divided in."""

    outputs: int = 128
    rows: int = 16
    splits: int = 1
    launch: Launch = field(default_factory=Launch)


def product_tiles(
    rows: int, outputs: int, tiles: int, *, bits: int, processors: int, element_bytes: int = 2
) -> ProductTiles:
    """The usual ones for a product of `rows` rows with a weight of `tiles` tiles.

    The fastest that a first form of the kernel had on an H200. They fit into the 99 KiB of shared
    memory that small GPUs have. The inputs are divided until each processor has four programs.
    """
    most = 64 // (2 if bits == 2 else 1) // (2 if element_bytes > 2 else 1)
    each = min(padded(rows, at_least=SMALLEST_DOT), most)
    launch = Launch(num_warps=8 if each > 32 else 4, num_stages=3)
    programs = triton.cdiv(outputs, _OUTPUTS) * triton.cdiv(rows, each)
    wanted = min(triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs), _MOST_SPLITS)
    splits = max(1, min(wanted, tiles // _FEWEST_SPLIT_TILES))
    return ProductTiles(outputs=_OUTPUTS, rows=each, splits=splits, launch=launch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """words int32 [tiles, rows, 16], as `arranged`; scales and zero points uint8 [blocks, rows].

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
        tiles = num_tiles(blocks * self.block_size, self.bits)
        check("words", self.words, dtypes=(torch.int32,), shape=(tiles, None, WORDS))
        shape = (blocks, self.words.shape[1])
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
            return self.matrix.words.shape[1], self.matrix.columns
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """Words or floats, scales, zero points, offsets, order."""
        if isinstance(self.matrix, PackedWeight):
            packed = self.matrix
            return packed.words, packed.scales, packed.zero_points, self.offsets, self.order
        return self.matrix, None, None, None, None


@triton.jit
def _group_codes(words, zero, group: tl.constexpr, bits: tl.constexpr, outputs: tl.constexpr):
    """Codes of a group [outputs, 32] as bfloat16, divided by 64, less `zero`.

    The bits of a code below the ninth, with zeros above, are those of a bfloat16 that is 2^−133
    times as large: a multiplication makes a number of it, where or-ing an exponent in front and
    taking it away again would be two instructions.
    """
    at: tl.constexpr = group * bits % 8
    pair = (words >> (group * bits // 8 * 8)) & (((1 << bits) - 1) * 0x10001 << at)
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    codes = tl.reshape(tl.join(low, high), (outputs, 32))
    return (codes * (2.0 ** (127 - at)) - zero).to(tl.bfloat16)


@triton.jit
def _zero_codes(zero_points, place, bits: tl.constexpr, has_zeros: tl.constexpr):
    """What is taken from codes divided by 64: [outputs, 1] or [1, 1]."""
    if has_zeros:
        zero = (tl.load(zero_points + place).to(tl.float32) / _UNIT).to(tl.bfloat16)[:, None]
    else:
        zero = tl.full((1, 1), 2.0 ** (bits - 7), dtype=tl.bfloat16)
    return zero


@triton.jit
def add_products(
    sums, rows, row_inside, order, words, scales, zero_points, offsets, n, begin, end,
    num_outputs, num_inputs, padding,
    bits: tl.constexpr, block_size: tl.constexpr, has_zeros: tl.constexpr,
    has_offsets: tl.constexpr, has_order: tl.constexpr, is_whole: tl.constexpr,
    block_outputs: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """sums [outputs, rows] += tiles begin … end − 1 of a weight · the rows that `rows` points to.

    n [outputs]: which they are, each less than num_outputs. is_whole: each column of the tiles is
    one of a row's numbers, in their order. See `inputs_of` for order and padding.
    """
    groups: tl.constexpr = 16 // bits
    # Blocks in a tile, groups in a block and blocks in a group: two of the three are 1.
    block_groups: tl.constexpr = min(max(block_size // 32, 1), groups)
    group_blocks: tl.constexpr = max(32 // block_size, 1)
    word = tl.arange(0, 16)
    of_group = tl.arange(0, 32)
    num_blocks = (num_inputs + block_size - 1) // block_size
    for tile in range(begin, end):
        place = (tile * num_outputs + n)[:, None] * 16 + word[None, :]
        packed = tl.load(words + place).to(tl.uint32, bitcast=True)
        for first in tl.static_range(0, groups, block_groups):
            for part in tl.static_range(group_blocks):
                k = (tile * groups + first) * 32 + part * block_size
                block = tl.minimum(k // block_size, num_blocks - 1)
                zero = _zero_codes(zero_points, block * num_outputs + n, bits, has_zeros)
                products = tl.zeros((block_outputs, block_rows), dtype=tl.float32)
                totals = tl.zeros((block_rows,), dtype=tl.float32)
                for group in tl.static_range(block_groups):
                    codes = _group_codes(packed, zero, first + group, bits, block_outputs)
                    column = (tile * groups + first + group) * 32 + of_group
                    if is_whole and group_blocks == 1:
                        x = tl.load(
                            rows[None, :] + column[:, None], mask=row_inside[None, :], other=0.0
                        )
                    else:
                        source, inside = inputs_of(order, column, num_inputs, padding, has_order)
                        if group_blocks > 1:
                            inside = inside & (of_group // block_size == part)
                        x = tl.load(
                            rows[None, :] + source[:, None],
                            mask=inside[:, None] & row_inside[None, :], other=0.0,
                        )  # fmt: skip
                    products = tl.dot(codes.to(x.dtype), x, products, input_precision="tf32x3")
                    if has_offsets:
                        totals += tl.sum(x.to(tl.float32), axis=0)
                scale = tl.load(scales + block * num_outputs + n).to(tl.float32) * _UNIT
                sums += products * scale[:, None]
                if has_offsets:
                    offset = tl.load(offsets + n * num_blocks + block)
                    sums += offset[:, None] * totals[None, :]
    return sums


@triton.jit
def inputs_of(order, k, num_inputs, padding, has_order: tl.constexpr):
    """Which of a row's numbers columns are multiplied by, and whether there is one."""
    inside = k < num_inputs
    if has_order:
        k = tl.load(order + k, mask=inside, other=0)
    k -= padding
    return k, inside & (k >= 0)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x, words, scales, zero_points, bias, out,
    num_rows, num_outputs, num_inputs, num_tiles, split_tiles,
    bits: tl.constexpr, block_size: tl.constexpr, has_zeros: tl.constexpr, biased: tl.constexpr,
    is_whole: tl.constexpr, block_outputs: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """One tile of the product of the weight's tiles of program axis 2, into that axis of `out`."""
    m = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    n = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    split = tl.program_id(2)
    row_inside = m < num_rows
    begin = split * split_tiles
    sums = add_products(
        tl.zeros((block_outputs, block_rows), dtype=tl.float32),
        x + m.to(tl.int64) * num_inputs, row_inside, x, words, scales, zero_points, x,
        tl.minimum(n, num_outputs - 1), begin, tl.minimum(begin + split_tiles, num_tiles),
        num_outputs, num_inputs, 0, bits, block_size, has_zeros, False, False, is_whole,
        block_outputs, block_rows,
    )  # fmt: skip
    if biased:
        sums += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
    place = (split.to(tl.int64) * num_rows + m) * num_outputs
    tl.store(
        out + place[None, :] + n[:, None], sums.to(out.dtype.element_ty),
        mask=row_inside[None, :] & (n < num_outputs)[:, None],
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    parts, bias, out, count, num_outputs, splits, biased: tl.constexpr, block: tl.constexpr
):
    """out = the sum of the parts (+ bias), in the order of the splits."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.zeros((block,), dtype=tl.float32)
    part = parts + at
    for _ in range(splits):
        total += tl.load(part, mask=inside, other=0.0)
        part += count
    if biased:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_kernel(
    words, scales, zero_points, out, first_output, count, num_outputs, num_inputs,
    bits: tl.constexpr, block_size: tl.constexpr, has_zeros: tl.constexpr,
    block_outputs: tl.constexpr,
):  # fmt: skip
    """One tile of the weights of `count` outputs [count, inputs]."""
    groups: tl.constexpr = 16 // bits
    tile = tl.program_id(0)
    own = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    n = first_output + tl.minimum(own, count - 1)
    place = (tile * num_outputs + n)[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(words + place).to(tl.uint32, bitcast=True)
    num_blocks = (num_inputs + block_size - 1) // block_size
    for group in tl.static_range(groups):
        k = (tile * groups + group) * 32 + tl.arange(0, 32)
        block = tl.minimum(k // block_size, num_blocks - 1)
        at = block[None, :] * num_outputs + n[:, None]
        codes = _group_codes(packed, 0.0, group, bits, block_outputs).to(tl.float32) * _UNIT
        if has_zeros:
            codes -= tl.load(zero_points + at).to(tl.float32)
        else:
            codes -= 1 << (bits - 1)
        value = codes * tl.load(scales + at).to(tl.float32)
        tl.store(
            out + own.to(tl.int64)[:, None] * num_inputs + k[None, :],
            value.to(out.dtype.element_ty),
            mask=(own < count)[:, None] & (k < num_inputs)[None, :],
        )  # fmt: skip


def matmul_nbits(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tiles: ProductTiles | None = None,
) -> Tensor:
    """x [..., columns], weight [rows, columns], bias [rows] → [..., rows].

    The result has the type of x unless `out` has another. Without `tiles` the number of rows of x
    chooses the way. Raises ValueError.
    """
    check("x", x, dtypes=FLOATS, like=weight.words)
    num_outputs = weight.words.shape[1]
    if not x.ndim or x.shape[-1] != weight.columns:
        raise ValueError(f"x has the shape {list(x.shape)}, the weight {weight.columns} columns")
    if bias is not None:
        check("bias", bias, dtypes=FLOATS, shape=(num_outputs,), like=x)
    out = output("out", out, shape=(*x.shape[:-1], num_outputs), like=x)
    if not out.numel():
        return out
    rows = out.numel() // num_outputs
    if tiles is None and rows > MOST_TILED_ROWS:
        return _unpacked_product(x, weight, bias, out)
    count = weight.words.shape[0]
    tiles = tiles or product_tiles(
        rows, num_outputs, count, bits=weight.bits, processors=num_processors(x.device),
        element_bytes=x.element_size(),
    )  # fmt: skip
    splits = min(tiles.splits, count)
    target, target_bias = out, bias
    if splits > 1:
        target = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
        target_bias = None
    grid = triton.cdiv(rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs), splits
    _product_kernel[grid](
        x, *_arrays(weight), x if target_bias is None else target_bias, target,
        rows, num_outputs, weight.columns, count, triton.cdiv(count, splits),
        biased=target_bias is not None, is_whole=is_whole(weight),
        block_outputs=tiles.outputs, block_rows=tiles.rows, **_form(weight),
        **tiles.launch.options(),
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
            target, out if bias is None else bias, out, out.numel(), num_outputs, splits,
            biased=bias is not None, block=_SUM_BLOCK, **Launch(num_stages=1).options(),
        )  # fmt: skip
    return out


def unpacked(weight: PackedWeight, outputs: range, dtype: torch.dtype) -> Tensor:
    """Weights [outputs, columns] of these outputs, which are one after the other."""
    words, count = weight.words, len(outputs)
    out = torch.empty(count, weight.columns, dtype=dtype, device=words.device)
    block = 64
    _unpack_kernel[words.shape[0], triton.cdiv(count, block)](
        *_arrays(weight), out, outputs.start, count, words.shape[1], weight.columns,
        block_outputs=block, **_form(weight), **Launch(num_stages=1).options(),
    )  # fmt: skip
    return out


def _unpacked_product(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> Tensor:
    num_outputs = out.shape[-1]
    most = min(_UNPACKED_BYTES, cache_bytes(x.device) // 2)
    each = max(64, most // (weight.columns * x.element_size()) // 64 * 64)
    for start in range(0, num_outputs, each):
        some = range(start, min(start + each, num_outputs))
        own = None if bias is None else bias[some.start : some.stop]
        matmul(x, unpacked(weight, some, x.dtype), own, out=out[..., some.start : some.stop])
    return out


def is_whole(weight: PackedWeight) -> bool:
    """Whether each column of its tiles is one of the weight's."""
    return bool(weight.words.shape[0] * tile_inputs(weight.bits) == weight.columns)


def _arrays(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    zeros = weight.zero_points
    return weight.words, weight.scales, weight.words if zeros is None else zeros


def _form(weight: PackedWeight) -> dict[str, int | bool]:
    return {
        "bits": weight.bits,
        "block_size": weight.block_size,
        "has_zeros": weight.zero_points is not None,
    }
