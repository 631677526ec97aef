"""Products by Triton: float and packed weights, few rows and many, sizes that divide by nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.kernels.matmul import reference as matmul_reference
from edge.kernels.matmul_nbits.gpu_layout import gpu_layout
from edge.kernels.matmul_nbits.reference import LEAST_BLOCK, dequantize, quantize
from tests.support.gpu_weights import assert_near, packed_weight, with_zero_points, zero_points
from tests.support.operator_face import normal
from tests.support.triton_face import (
    FLOAT_DTYPES,
    assert_close,
    assert_only_inside_written,
    output,
    rounded,
    tensor,
)

FEW = settings(max_examples=15)
seeds = st.integers(0, 2**32 - 5)
dtypes = st.sampled_from(FLOAT_DTYPES)


def tiles(rows: int, splits: int, *, narrow: bool) -> Any:
    """Small ones, so that small products need several; GEMV for `narrow` products."""
    from edge.kernels.triton_launch import GemmTiles, GemvTiles

    if narrow and rows <= 4:
        return GemvTiles(outputs=4, inputs=64)
    return GemmTiles(rows=16, outputs=16, inputs=64, splits=splits)


@FEW
@given(
    seed=seeds, rows=st.integers(1, 20), outputs=st.integers(1, 40), inputs=st.integers(1, 150),
    dtype=dtypes, biased=st.booleans(), splits=st.sampled_from([1, 3]), narrow=st.booleans(),
)  # fmt: skip
def test_matmul(
    seed: int, rows: int, outputs: int, inputs: int, dtype: str, biased: bool, splits: int,
    narrow: bool,
) -> None:  # fmt: skip
    from edge.kernels.matmul.triton import matmul

    x = rounded(normal(seed, 1, rows, inputs), dtype)
    weight = rounded(normal(seed + 1, outputs, inputs), dtype)
    bias = rounded(normal(seed + 2, outputs), dtype) if biased else None
    out = output(1, rows, outputs, dtype=dtype)
    result = matmul(
        tensor(x, dtype), tensor(weight, dtype), None if bias is None else tensor(bias, dtype),
        out=out, tiles=tiles(rows, splits, narrow=narrow),
    )  # fmt: skip
    assert result is out
    assert_close(out, matmul_reference.matmul(x, weight, bias), dtype)
    assert_only_inside_written(out)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_without_tiles_the_rows_choose_the_kernel(rows: int) -> None:
    """And a result may be wider than what it is made from."""
    from edge.kernels.matmul.triton import matmul

    x, weight = (rounded(normal(i, n, 70), "bfloat16") for i, n in ((1, rows), (2, 9)))
    out = output(rows, 9)
    matmul(tensor(x, "bfloat16"), tensor(weight, "bfloat16"), out=out)
    assert_close(out, matmul_reference.matmul(x, weight), "float32")


@settings(FEW, max_examples=40)
@given(
    seed=seeds, rows=st.integers(1, 20), outputs=st.integers(1, 40), columns=st.integers(1, 300),
    bits=st.sampled_from([2, 4, 8]), block_size=st.sampled_from([16, 32, 64, 128]), dtype=dtypes,
    biased=st.booleans(), has_zeros=st.booleans(), half_scales=st.booleans(),
    splits=st.sampled_from([1, 3]), narrow=st.booleans(),
)  # fmt: skip
def test_matmul_nbits(
    seed: int, rows: int, outputs: int, columns: int, bits: int, block_size: int, dtype: str,
    biased: bool, has_zeros: bool, half_scales: bool, splits: int, narrow: bool,
) -> None:  # fmt: skip
    """Against what the codes stand for: float32 loses nothing more, others round the weight too."""
    from edge.kernels.matmul_nbits.triton import matmul_nbits

    block_size = max(LEAST_BLOCK[bits], block_size)
    matrix = quantize(normal(seed, outputs, columns), bits=bits, block_size=block_size)
    zeros = zero_points(seed, matrix) if has_zeros else None
    packed = packed_weight(matrix, zeros, half_scales=half_scales)
    scales = matrix.scales.astype(np.float16 if half_scales else np.float32).astype(np.float32)
    weight = with_zero_points(matrix, scales, zeros)
    x = rounded(normal(seed + 1, rows, columns), dtype)
    bias = normal(seed + 2, outputs) if biased else None
    out = output(rows, outputs, dtype=dtype)
    matmul_nbits(
        tensor(x, dtype), packed, None if bias is None else tensor(bias),
        out=out, tiles=tiles(rows, splits, narrow=narrow),
    )  # fmt: skip
    assert_near(out, x, weight, bias, dtype)
    assert_only_inside_written(out)


@pytest.mark.parametrize("rows", [1, 3, 4, 6])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_rows_and_many_read_one_layout(bits: int, rows: int) -> None:
    """Without tiles; and both kernels agree on the same packed weight."""
    from edge.kernels.matmul_nbits.triton import matmul_nbits
    from edge.kernels.triton_launch import GemmTiles

    matrix = quantize(normal(bits, 24, 200), bits=bits, block_size=32)
    packed = packed_weight(matrix, None)
    x = normal(rows, rows, 200)
    chosen = matmul_nbits(tensor(x), packed)
    tiled = matmul_nbits(tensor(x), packed, tiles=GemmTiles(rows=16, outputs=16, inputs=64))
    assert_near(chosen, x, dequantize(matrix), None, "float32")
    assert_near(tiled, x, dequantize(matrix), None, "float32")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_words_and_scales_stand_for_the_matrix(bits: int, block_size: int) -> None:
    """Unpacked by the layout's own words, not by the kernel."""
    block_size = max(LEAST_BLOCK[bits], block_size)
    matrix = quantize(normal(bits, 5, 300), bits=bits, block_size=block_size)
    zeros = zero_points(bits, matrix)
    layout = gpu_layout(matrix, zero_points=zeros)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    codes = layout.words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    codes = codes.reshape(5, -1)[:, :300].astype(np.float32)
    assert layout.zero_points is not None
    block = np.arange(300) // block_size
    weight = (codes - layout.zero_points[block].T) * layout.scales[block].T
    np.testing.assert_array_equal(weight, with_zero_points(matrix, matrix.scales, zeros))
    symmetric = gpu_layout(matrix)
    assert symmetric.zero_points is None
    np.testing.assert_array_equal(
        (codes - matrix.zero_code) * symmetric.scales[block].T, dequantize(matrix)
    )


def test_the_words_are_the_stored_codes_themselves() -> None:
    """Nothing is copied but the scales."""
    matrix = quantize(normal(1, 6, 64), bits=4, block_size=32)
    assert np.shares_memory(gpu_layout(matrix).words, matrix.codes)


def test_half_scales_that_would_be_lost_are_refused() -> None:
    small = quantize(1e-7 * normal(1, 2, 32), bits=4, block_size=32)
    large = quantize(1e7 * normal(1, 2, 32), bits=4, block_size=32)
    for matrix in (small, large):
        with pytest.raises(ValueError, match="too large or too small for float16"):
            gpu_layout(matrix, half_scales=True)
    zero = quantize(np.zeros((2, 32), np.float32), bits=4, block_size=32)
    assert (gpu_layout(zero, half_scales=True).scales == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    import torch

    from edge.kernels.matmul.triton import matmul
    from edge.kernels.matmul_nbits.triton import PackedWeight, matmul_nbits

    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 8\], the weight 7 inputs"):
        matmul(x, torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"bias has the shape \[2\], not \[3\]"):
        matmul(x, weight, torch.zeros(2))
    with pytest.raises(ValueError, match="weight is not contiguous"):
        matmul(x, torch.zeros(8, 3).T)
    matrix = quantize(normal(1, 3, 40), bits=4, block_size=32)
    packed = packed_weight(matrix, None)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 8\], the weight 40 columns"):
        matmul_nbits(x, packed)
    fields = {"words": packed.words, "scales": packed.scales, "bits": 4, "columns": 40}
    with pytest.raises(ValueError, match=r"words has the shape \[3, 8\], not \[any, 6\]"):
        PackedWeight(**fields, block_size=16)
    with pytest.raises(ValueError, match=r"scales has the shape \[2, 3\], not \[1, 3\]"):
        PackedWeight(**fields, block_size=64)
    with pytest.raises(ValueError, match="blocks of 24 weights are not supported"):
        PackedWeight(**fields, block_size=24)
    with pytest.raises(ValueError, match=r"zero points are uint8 \[2, 3\], not uint8 \[3, 2\]"):
        gpu_layout(matrix, zero_points=np.zeros((2, 3), np.uint8))


def test_nothing_is_launched_for_nothing() -> None:
    import torch

    from edge.kernels.matmul.triton import matmul
    from edge.kernels.matmul_nbits.triton import matmul_nbits

    packed = packed_weight(quantize(normal(1, 3, 40), bits=4, block_size=32), None)
    assert matmul(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)
    assert matmul_nbits(torch.zeros(0, 40), packed).shape == (0, 3)


def test_tiles_keep_a_gpu_busy() -> None:
    from edge.kernels.triton_launch import gemm_tiles

    small = gemm_tiles(16, 4096, 14336, element_bytes=2, processors=132)
    assert (small.rows, small.splits) == (16, 4)
    assert gemm_tiles(4096, 4096, 4096, element_bytes=2, processors=132).splits == 1
    assert gemm_tiles(16, 64, 128, element_bytes=2, processors=132).splits == 1


@pytest.mark.parametrize(
    ("outputs", "processors", "expected"),
    [
        (14336, 132, (8, 1024)),  # H200
        (4096, 132, (8, 1024)),
        (1024, 132, (2, 4096)),
        (1024, 108, (4, 2048)),  # A100
        (1024, 30, (8, 1024)),  # a small card
        (10, 132, (2, 4096)),
        (10, 1, (8, 1024)),
    ],
)
def test_narrow_products_are_divided_among_a_gpus_processors(
    outputs: int, processors: int, expected: tuple[int, int]
) -> None:
    from edge.kernels.triton_launch import gemv_tiles

    found = gemv_tiles(outputs, inputs=1024, processors=processors)
    assert (found.outputs, found.inputs) == expected


@pytest.mark.parametrize("processors", [1, 132])
def test_narrow_and_wide_tiles_compute_the_same(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge.kernels.matmul import triton as floats
    from edge.kernels.matmul_nbits import triton as codes

    matrix = quantize(normal(1, 24, 200), bits=4, block_size=32)
    x = normal(2, 3, 200)
    monkeypatch.setattr(floats, "num_processors", lambda _device: processors)
    packed = packed_weight(matrix, None)
    assert_near(codes.matmul_nbits(tensor(x), packed), x, dequantize(matrix), None, "float32")
    given = floats.matmul(tensor(x), tensor(dequantize(matrix)))
    assert_near(given, x, dequantize(matrix), None, "float32")
