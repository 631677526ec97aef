"""Products by Triton: float and packed weights, few rows and many, sizes that divide by nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.kernels.matmul import reference as matmul_reference
from edge.kernels.matmul_nbits.reference import LEAST_BLOCK, dequantize, quantize
from tests.support.gpu_weights import assert_near, packed_weight, with_zero_points, zero_points
from tests.support.operator_face import normal
from tests.support.triton_face import (
    FLOAT_DTYPES,
    assert_close,
    assert_only_inside_written,
    is_untouched,
    output,
    rounded,
    tensor,
)

FEW = settings(max_examples=15)
seeds = st.integers(0, 2**32 - 5)
dtypes = st.sampled_from(FLOAT_DTYPES)


def tiles(rows: int, splits: int) -> Any:
    """Small ones, so that small products need several programs."""
    from edge.kernels.matmul_nbits.triton import ProductTiles

    return ProductTiles(outputs=16, rows=8 if rows <= 8 else 16, splits=splits)


@FEW
@given(
    seed=seeds, rows=st.integers(1, 20), outputs=st.integers(1, 40), inputs=st.integers(1, 150),
    dtype=dtypes, biased=st.booleans(),
)  # fmt: skip
def test_matmul(seed: int, rows: int, outputs: int, inputs: int, dtype: str, biased: bool) -> None:
    """Into columns of something wider."""
    from edge.kernels.matmul.triton import matmul

    x = rounded(normal(seed, 1, rows, inputs), dtype)
    weight = rounded(normal(seed + 1, outputs, inputs), dtype)
    bias = rounded(normal(seed + 2, outputs), dtype) if biased else None
    out = output(1, rows, outputs + 2, dtype=dtype)
    result = matmul(
        tensor(x, dtype), tensor(weight, dtype), None if bias is None else tensor(bias, dtype),
        out=out[..., 1:-1],
    )  # fmt: skip
    assert_close(result.contiguous(), matmul_reference.matmul(x, weight, bias), dtype)
    assert is_untouched(out[..., [0, -1]]).all()
    assert_only_inside_written(out)


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_result_may_be_wider_than_what_it_is_made_from(rows: int, is_packed: bool) -> None:
    from edge.kernels.matmul.triton import matmul
    from edge.kernels.matmul_nbits.triton import matmul_nbits

    matrix = quantize(normal(1, 9, 70), bits=4, block_size=32)
    x, weight = rounded(normal(2, rows, 70), "bfloat16"), rounded(dequantize(matrix), "bfloat16")
    out = output(rows, 9)
    if is_packed:
        matmul_nbits(tensor(x, "bfloat16"), packed_weight(matrix, None), out=out)
        assert_near(out, x, weight if rows > 128 else dequantize(matrix), None, "float32")
        return
    matmul(tensor(x, "bfloat16"), tensor(weight, "bfloat16"), out=out)
    assert_close(out, matmul_reference.matmul(x, weight), "float32")


@settings(FEW, max_examples=40)
@given(
    seed=seeds, rows=st.integers(1, 20), outputs=st.integers(1, 40), columns=st.integers(1, 300),
    bits=st.sampled_from([2, 4, 8]), block_size=st.sampled_from([16, 32, 64, 128, 256]),
    dtype=dtypes, biased=st.booleans(), has_zeros=st.booleans(), half_scales=st.booleans(),
    splits=st.sampled_from([1, 3]),
)  # fmt: skip
def test_matmul_nbits(
    seed: int, rows: int, outputs: int, columns: int, bits: int, block_size: int, dtype: str,
    biased: bool, has_zeros: bool, half_scales: bool, splits: int,
) -> None:  # fmt: skip
    """Against what the codes stand for, in tiles and unpacked: 16-bit floats round the latter."""
    from edge.kernels.matmul_nbits.triton import MOST_TILED_ROWS, matmul_nbits

    block_size = max(LEAST_BLOCK[bits], block_size)
    matrix = quantize(normal(seed, outputs, columns), bits=bits, block_size=block_size)
    zeros = zero_points(seed, matrix) if has_zeros else None
    packed = packed_weight(matrix, zeros, half_scales=half_scales)
    scales = matrix.scales.astype(np.float16 if half_scales else np.float32).astype(np.float32)
    weight = with_zero_points(matrix, scales, zeros)
    bias = normal(seed + 2, outputs) if biased else None
    for count in (rows, rows + MOST_TILED_ROWS):
        x = rounded(normal(seed + 1, count, columns), dtype)
        out = output(count, outputs, dtype=dtype)
        matmul_nbits(
            tensor(x, dtype), packed, None if bias is None else tensor(bias), out=out,
            tiles=tiles(rows, splits) if count == rows else None,
        )  # fmt: skip
        assert_near(out, x, weight, bias, dtype)
        assert_only_inside_written(out)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_words_hold_the_codes_in_groups_of_two_halves(bits: int, block_size: int) -> None:
    """As the layout's text says it, not by the kernel."""
    import torch

    from edge.kernels.matmul_nbits.gpu_layout import arranged, tile_inputs

    block_size = max(LEAST_BLOCK[bits], block_size)
    matrix = quantize(normal(bits, 5, 300), bits=bits, block_size=block_size)
    words = arranged(torch.from_numpy(matrix.codes), bits).numpy().view(np.uint32)
    per_tile = tile_inputs(bits)
    found = np.empty((5, words.shape[0] * per_tile), np.uint8)
    for k in range(found.shape[1]):
        tile, rest = divmod(k, per_tile)
        group, inside = divmod(rest, 32)
        shift = 16 * (inside % 2) + bits * group
        found[:, k] = words[tile, :, inside // 2] >> shift & ((1 << bits) - 1)
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    stored = matrix.codes.reshape(5, -1)[:, :, None] >> shifts & ((1 << bits) - 1)
    np.testing.assert_array_equal(found[:, :300], stored.reshape(5, -1)[:, :300])


def zeros(*shape: int) -> Any:
    return tensor(np.zeros(shape, np.float32))


def test_what_does_not_fit_is_refused() -> None:
    from edge.kernels.matmul.triton import matmul
    from edge.kernels.matmul_nbits.triton import PackedWeight, matmul_nbits

    x, weight = zeros(2, 8), zeros(3, 8)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 8\], the weight 7 inputs"):
        matmul(x, zeros(3, 7))
    with pytest.raises(ValueError, match=r"bias has the shape \[2\], not \[3\]"):
        matmul(x, weight, zeros(2))
    with pytest.raises(ValueError, match="weight is not contiguous"):
        matmul(x, zeros(8, 3).T)
    matrix = quantize(normal(1, 3, 40), bits=4, block_size=32)
    packed = packed_weight(matrix, None)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 8\], the weight 40 columns"):
        matmul_nbits(x, packed)
    fields = {"words": packed.words, "scales": packed.scales, "bits": 4, "columns": 40}
    with pytest.raises(ValueError, match=r"words has the shape \[1, 3, 16\], not \[2, any, 16\]"):
        PackedWeight(**{**fields, "bits": 8}, block_size=128)
    with pytest.raises(ValueError, match=r"scales has the shape \[2, 3\], not \[1, 3\]"):
        PackedWeight(**fields, block_size=64)
    with pytest.raises(ValueError, match="blocks of 24 weights are not supported"):
        PackedWeight(**fields, block_size=24)
    with pytest.raises(ValueError, match=r"zero_points has the shape \[3, 2\], not \[2, 3\]"):
        PackedWeight(**fields, block_size=32, zero_points=zeros(3, 2).byte())


def test_nothing_is_launched_for_nothing() -> None:
    from edge.kernels.matmul.triton import matmul
    from edge.kernels.matmul_nbits.triton import matmul_nbits

    packed = packed_weight(quantize(normal(1, 3, 40), bits=4, block_size=32), None)
    assert matmul(zeros(0, 8), zeros(3, 8)).shape == (0, 3)
    assert matmul_nbits(zeros(0, 40), packed).shape == (0, 3)


@pytest.mark.parametrize("processors", [1, 132])
def test_products_are_divided_until_a_gpu_is_busy(processors: int) -> None:
    from edge.kernels.matmul_nbits.triton import matmul_nbits, product_tiles

    for rows, bits, each in ((1, 4, 16), (17, 4, 32), (64, 8, 64), (64, 2, 32)):
        narrow = product_tiles(rows, 1024, 112, bits=bits, processors=processors)
        assert narrow.rows == each
        assert (narrow.splits > 1) == (processors > 1)
        assert product_tiles(rows, 1024, 2, bits=bits, processors=processors).splits == 1
        assert product_tiles(rows, 1 << 20, 112, bits=bits, processors=processors).splits == 1
    matrix = quantize(normal(1, 24, 1000), bits=4, block_size=32)
    x = normal(2, 3, 1000)
    usual = product_tiles(3, 24, 8, bits=4, processors=processors)
    given = matmul_nbits(tensor(x), packed_weight(matrix, None), tiles=usual)
    assert_near(given, x, dequantize(matrix), None, "float32")
