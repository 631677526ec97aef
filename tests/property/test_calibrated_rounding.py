"""Calibrated rounding: what GPTQ computes column by column, and less error of the outputs."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.kernels.matmul_blocks import calibrated as in_blocks
from edge.kernels.matmul_blocks.reference import FORMS, BlockForm, BlockParts, row_blocks
from edge.kernels.matmul_blocks.reference import dequantize as dequantize_blocks
from edge.kernels.matmul_nbits.calibrated import quantize_calibrated
from edge.kernels.matmul_nbits.reference import (
    LEAST_BLOCK,
    QuantizedMatrix,
    dequantize,
    quantize,
    unpack,
)
from edge.weights.block_rounding import BlockRounding

FORMATS = [(2, False), (2, True), (4, False), (4, True), (8, False), (8, True)]
DAMPING = 0.1


def gaussian(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def gram_of(columns: int, seed: int = 1, tokens: int = 400) -> NDArray[np.float32]:
    """x^T x of inputs that go up and down together, some of them much larger than others."""
    shared = gaussian(tokens, 6, seed) @ gaussian(6, columns, seed + 1)
    sizes = np.exp(gaussian(1, columns, seed + 2))
    x = (shared + gaussian(tokens, columns, seed + 3)) * sizes
    return np.asarray(x.T @ x, np.float32)


def runs_of(gram: NDArray[np.float32], width: int) -> list[NDArray[np.float32]]:
    starts = range(0, len(gram), width)
    return [gram[start : start + width, start : start + width] for start in starts]


def output_error(
    weight: NDArray[np.generic], matrix: QuantizedMatrix, gram: NDArray[np.float32]
) -> float:
    error = dequantize(matrix).astype(np.float64) - weight.astype(np.float64)
    return float(np.sum((error @ gram.astype(np.float64)) * error))


def codes_of(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    return unpack(matrix.codes, matrix.bits).reshape(len(matrix.codes), -1)[:, : matrix.columns]


def assert_alike(first: QuantizedMatrix, second: QuantizedMatrix) -> None:
    np.testing.assert_array_equal(first.codes, second.codes)
    np.testing.assert_array_equal(first.scales, second.scales)
    if first.zero_points is not None and second.zero_points is not None:
        np.testing.assert_array_equal(first.zero_points, second.zero_points)


def assert_nearly_alike(first: QuantizedMatrix, second: QuantizedMatrix) -> None:
    """Of products that BLAS sums in another order: one row in fifty may have met a tie, and every
    other has the same codes, and scales that differ in their last bits."""
    same = np.all(first.codes == second.codes, axis=(1, 2))
    assert np.count_nonzero(~same) <= max(1, len(same) // 50)
    np.testing.assert_allclose(first.scales[same], second.scales[same], rtol=1e-5)


def rows_of(matrix: QuantizedMatrix, start: int, stop: int) -> QuantizedMatrix:
    zeros = matrix.zero_points
    return replace(
        matrix,
        codes=matrix.codes[start:stop],
        scales=matrix.scales[start:stop],
        zero_points=None if zeros is None else zeros[start:stop],
    )


def gptq(
    weight: NDArray[np.float32],
    gram: NDArray[np.float32],
    bits: int,
    block_size: int,
    zeros: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Codes and values of one run as in the paper: the inverse Hessian's Cholesky factor.

    After a block its scale is fitted again by the Hessian of the block's columns given that those
    behind it are chosen freely, so errors of the block are put right before they are handed on.
    """
    last = 2**bits - 1
    h = gram.astype(np.float64)
    h = h / h.diagonal().mean() + DAMPING * np.eye(len(h))
    factor = np.linalg.cholesky(np.linalg.inv(h)).T
    w = weight.astype(np.float64)
    codes, values = np.zeros_like(w), np.zeros_like(w)
    for first in range(0, w.shape[1], block_size):
        stop = min(first + block_size, w.shape[1])
        block = slice(first, stop)
        target = w[:, block].copy()
        scale, zero = searched(target, h.diagonal()[block], bits, zeros)
        for k in range(first, stop):
            codes[:, k] = np.clip(np.rint(w[:, k] / scale), -zero, last - zero)
            error = (w[:, k] - codes[:, k] * scale) / factor[k, k]
            w[:, k + 1 : stop] -= error[:, None] * factor[k, k + 1 : stop]
            codes[:, k] += zero
        signed = codes[:, block] - zero[:, None]
        # What is lost where all later columns do their best: the inverse of the inverse's corner.
        own = np.linalg.inv((factor.T @ factor)[block, block] - done(factor, block))
        mixed = np.einsum("ni,ij,nj->n", signed, own, target)
        scale = mixed / np.einsum("ni,ij,nj->n", signed, own, signed)
        values[:, block] = signed * scale[:, None]
        moved = target.copy()
        for k in range(first, stop):
            error = (moved[:, k - first] - values[:, k]) / factor[k, k]
            moved[:, k - first + 1 :] -= error[:, None] * factor[k, k + 1 : stop]
            w[:, stop:] -= error[:, None] * factor[k, stop:]
    return codes, values


def done(factor: NDArray[np.float64], block: slice) -> NDArray[np.float64]:
    """The part of the inverse Hessian that columns before the block account for."""
    earlier = factor[: block.start, block]
    return np.asarray(earlier.T @ earlier)


def searched(
    w: NDArray[np.float64], importance: NDArray[np.float64], bits: int, zeros: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scale and zero point of each row, a row at a time, with the least weighted error."""
    last = 2**bits - 1
    scales, points = [], []
    for row in w:
        low, high = min(row.min(), 0.0), max(row.max(), 0.0)
        point = float(np.clip(np.rint(-low * last / (high - low)), 0, last))
        tries = [(high - low) / last * part for part in (1.0, 0.92, 0.84, 0.76)]
        if not zeros:
            point = 2.0 ** (bits - 1)
            stretches = (1.0,) if bits == 8 else (1.0, 0.9375, 1.0625, 0.875, 1.125)
            tries = [row[np.abs(row).argmax()] / -point / stretch for stretch in stretches]
        best, best_scale = np.inf, 0.0
        for tried in tries:
            scale = tried
            for _ in range(2 if zeros else 1):
                code = np.clip(np.rint(row / scale), -point, last - point)
                scale = (importance * row * code).sum() / (importance * code * code).sum()
                error = (importance * (row - code * scale) ** 2).sum()
                if error < best:
                    best, best_scale = error, scale
        scales.append(best_scale)
        points.append(point)
    return np.array(scales), np.array(points)


@pytest.mark.parametrize(
    ("bits", "zeros", "block_size"),
    [(4, False, 16), (4, True, 32), (4, False, 128), (8, True, 16), (8, False, 32), (8, True, 128)],
)
def test_it_is_gptq(bits: int, zeros: bool, block_size: int) -> None:
    weight, gram = gaussian(60, 200), gram_of(200)
    matrix = quantize_calibrated(
        weight, [gram], bits=bits, block_size=block_size, zero_points=zeros
    )
    codes, values = gptq(weight, gram, bits, block_size, zeros)
    # Rows where a tie went the other way go on differently, hence the rows rather than the codes.
    # Such ties are common in one search: a stretch of 0.9375 puts the peak itself at -7.5.
    assert (codes_of(matrix) != codes).any(axis=1).mean() <= 0.25
    alike = (codes_of(matrix) == codes).all(axis=1)
    np.testing.assert_allclose(dequantize(matrix)[alike], values[alike], rtol=1e-3, atol=1e-5)
    error = values - weight
    expected = float(np.sum((error @ gram) * error))
    assert output_error(weight, matrix, gram) == pytest.approx(expected, rel=0.02)


@settings(max_examples=40)
@given(data=st.data())
def test_outputs_are_closer_than_after_plain_rounding(data: st.DataObject) -> None:
    bits, zeros = data.draw(st.sampled_from(FORMATS))
    block_size = max(LEAST_BLOCK[bits], data.draw(st.sampled_from([16, 32, 64])))
    columns = data.draw(st.integers(64, 300))
    width = block_size * data.draw(st.integers(2, 6))
    weight, gram = gaussian(24, columns), gram_of(columns, data.draw(st.integers(0, 99)))
    grams = runs_of(gram, width)
    matrix = quantize_calibrated(weight, grams, bits=bits, block_size=block_size, zero_points=zeros)
    plain = quantize(weight, bits=bits, block_size=block_size, zero_points=zeros)
    known = np.zeros_like(gram)
    for start, part in zip(range(0, columns, width), grams, strict=True):
        known[start : start + width, start : start + width] = part
    assert output_error(weight, matrix, known) < 0.7 * output_error(weight, plain, known)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e-12, 1e12])
@pytest.mark.parametrize(("bits", "zeros"), FORMATS)
def test_inputs_that_are_alike_change_nothing_but_nearer_codes(
    bits: int, zeros: bool, size: float
) -> None:
    weight = gaussian(40, 200)
    plain = quantize(weight, bits=bits, block_size=32, zero_points=zeros)
    matrix = quantize_calibrated(
        weight,
        runs_of(np.eye(200, dtype=np.float32) * np.float32(size), 64),
        bits=bits,
        block_size=32,
        zero_points=zeros,
    )
    # `quantize` keeps the codes of the scale that it tried, here they are the nearest to the one
    # that it stores.
    assert (codes_of(matrix) != codes_of(plain)).mean() < 0.06
    step = np.abs(np.repeat(plain.scales, 32, axis=1)[:, :200])
    np.testing.assert_array_less(np.abs(dequantize(matrix) - dequantize(plain)), 1.5 * step)
    errors = [float(np.square(dequantize(each) - weight).sum()) for each in (matrix, plain)]
    assert errors[0] <= errors[1]


@settings(max_examples=60)
@given(data=st.data())
def test_a_row_is_rounded_alike_whichever_rows_are_beside_it(data: st.DataObject) -> None:
    bits, zeros = data.draw(st.sampled_from(FORMATS))
    block_size = max(LEAST_BLOCK[bits], data.draw(st.sampled_from([16, 32, 64])))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 140))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    weight = gaussian(rows, columns).astype(ml_dtypes.bfloat16)
    grams = runs_of(gram_of(columns), 2 * block_size)
    whole = quantize_calibrated(weight, grams, bits=bits, block_size=block_size, zero_points=zeros)
    part = quantize_calibrated(
        weight[start:stop], grams, bits=bits, block_size=block_size, zero_points=zeros
    )
    assert_nearly_alike(part, rows_of(whole, start, stop))


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_tiles_do_not_show_in_the_result(block_size: int) -> None:
    weight, grams = gaussian(1100, 512), runs_of(gram_of(512), 256)  # three tiles
    seen: list[int] = []
    whole = quantize_calibrated(weight, grams, bits=4, block_size=block_size, on_rows=seen.append)
    assert seen == [512, 512, 76]
    some = quantize_calibrated(weight[500:1031], grams, bits=4, block_size=block_size)
    assert_nearly_alike(some, rows_of(whole, 500, 1031))


def test_rounding_ends_where_it_is_told_to() -> None:
    def stop(_rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_calibrated(gaussian(600, 32), [gram_of(32)], bits=4, block_size=32, on_rows=stop)


def test_inputs_that_were_always_zero_take_no_part() -> None:
    weight, gram = gaussian(30, 96), gram_of(96)
    dead = np.arange(96) % 5 == 2
    gram[dead] = 0
    gram[:, dead] = 0
    matrix = quantize_calibrated(weight, [gram], bits=8, block_size=32)
    assert np.abs(dequantize(matrix) - weight)[:, dead].max() < 0.1  # still near: text may differ
    gram[dead] = 1e6  # nothing of them is heard, whatever stands beside the diagonal's zero
    gram[np.arange(96), np.arange(96)] *= ~dead
    assert_alike(matrix, quantize_calibrated(weight, [gram], bits=8, block_size=32))


@pytest.mark.parametrize("tokens", [1, 3])
def test_fewer_tokens_than_columns_are_enough(tokens: int) -> None:
    weight, gram = gaussian(30, 256), gram_of(256, tokens=tokens)
    matrix = quantize_calibrated(weight, [gram], bits=4, block_size=32)
    plain = quantize(weight, bits=4, block_size=32)
    assert output_error(weight, matrix, gram) < 0.5 * output_error(weight, plain, gram)


def test_a_gram_with_eigenvalues_below_zero_is_damped_more() -> None:
    weight, gram = gaussian(30, 64), gram_of(64)
    gram -= np.float32(0.3 * gram.diagonal().mean()) * np.eye(64, dtype=np.float32)
    assert np.linalg.eigvalsh(gram).min() < -0.1 * gram.diagonal().mean()
    matrix = quantize_calibrated(weight, [gram], bits=4, block_size=32)
    assert np.abs(dequantize(matrix) - weight).max() < 3


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_every_float_type_is_rounded_as_its_float32_value(dtype: type) -> None:
    weight: NDArray[Any] = gaussian(6, 100).astype(dtype)
    gram = gram_of(100)
    assert_alike(
        quantize_calibrated(weight.T.copy().T, [gram], bits=4, block_size=32),
        quantize_calibrated(weight.astype(np.float32), [gram], bits=4, block_size=32),
    )


@pytest.mark.parametrize(("bits", "zeros"), FORMATS)
def test_zeros_stay_zero(bits: int, zeros: bool) -> None:
    weight = gaussian(3, 70)
    weight[:, 32:] = 0
    for grams in ([gram_of(70)], runs_of(gram_of(70), 32)):
        matrix = quantize_calibrated(weight, grams, bits=bits, block_size=32, zero_points=zeros)
        unpacked = unpack(matrix.codes, bits)
        past = unpacked[:, 2, 6:]
        np.testing.assert_array_equal(past, np.broadcast_to(matrix.zeros(slice(2, 3)), past.shape))
    assert not dequantize(matrix)[:, 32:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight, gram = gaussian(40, 72), gram_of(72)
    worse = weight.copy()
    worse[33, 71] = bad
    with pytest.raises(ValueError, match="weight holds NaN or infinity"):
        quantize_calibrated(worse, [gram], bits=4, block_size=32)
    gram[3, 4] = bad
    with pytest.raises(ValueError, match="gram holds NaN or infinity"):
        quantize_calibrated(weight, [gram], bits=4, block_size=32)
    with pytest.raises(ValueError, match="weight holds NaN or infinity"):
        quantize_calibrated(np.full((1, 32), 1e300), [gram_of(32)], bits=4, block_size=32)


@pytest.mark.parametrize(
    ("weight", "shapes", "message"),
    [
        (gaussian(2, 64), [(64,)], "a gram is"),
        (gaussian(2, 64), [(64, 32)], "a gram is"),
        (gaussian(2, 64), [(64, 64), (0, 0)], "a gram is"),
        (gaussian(2, 64), [(32, 32)], "grams of 32 columns for a weight of 64"),
        (gaussian(2, 64), [], "grams of 0 columns"),
        (gaussian(2, 64), [(48, 48), (16, 16)], "cut blocks of 32"),
        (gaussian(2, 64)[0], [(64, 64)], "rows and columns"),
        (np.zeros((2, 64), np.int32), [(64, 64)], "int32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    weight: NDArray[np.float32], shapes: list[tuple[int, ...]], message: str
) -> None:
    grams = [np.ones(shape, np.float32) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        quantize_calibrated(weight, grams, bits=4, block_size=32)


def test_what_is_no_gram_is_refused() -> None:
    gram = np.full((32, 32), 1e5, np.float32)
    gram[np.arange(32), np.arange(32)] = 1
    with pytest.raises(ValueError, match=r"no x\^T x"):
        quantize_calibrated(gaussian(2, 32), [gram], bits=4, block_size=32)


WHOLE_NUMBERS = [form for form in FORMS.values() if not form.has_table]


def floats_of(form: BlockForm, parts: BlockParts, columns: int) -> NDArray[np.float32]:
    whole = dequantize_blocks(form, row_blocks(form, parts))
    assert not whole[:, columns:].any() or form.has_minimum
    return whole[:, :columns]


def plainly(form: BlockForm, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    arrays, _largest = BlockRounding(form).rounded(weight)
    return dequantize_blocks(form, arrays["blocks"])[:, : weight.shape[1]]


def loss(error: NDArray[np.float32], gram: NDArray[np.float32]) -> float:
    return float(np.sum((error.astype(np.float64) @ gram) * error))


@pytest.mark.parametrize("form", WHOLE_NUMBERS, ids=lambda form: form.name)
def test_blocks_of_files_lose_less_than_after_plain_rounding(form: BlockForm) -> None:
    """By what is known of their inputs; where nothing is, as little."""
    columns, width = 700, 512
    weight, gram = gaussian(40, columns), gram_of(columns)
    parts = in_blocks.quantize_calibrated(form, weight, runs_of(gram, width))
    known = np.zeros_like(gram)
    for start in range(0, columns, width):
        own = slice(start, start + width)
        known[own, own] = gram[own, own]
    plain = loss(plainly(form, weight) - weight, known)
    assert loss(floats_of(form, parts, columns) - weight, known) < 0.7 * plain
    alike = [np.eye(width, dtype=np.float32), np.eye(columns - width, dtype=np.float32)]
    blind = floats_of(form, in_blocks.quantize_calibrated(form, weight, alike), columns)
    plain = float(np.square(plainly(form, weight) - weight).sum())
    assert float(np.square(blind - weight).sum()) < 1.02 * plain


@settings(max_examples=20)
@given(data=st.data())
def test_rows_in_blocks_are_rounded_alone(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(WHOLE_NUMBERS))
    rows, columns = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 600))
    start = data.draw(st.integers(0, rows - 1))
    weight = gaussian(rows, columns).astype(ml_dtypes.bfloat16)
    grams = runs_of(gram_of(columns), 512)
    whole = row_blocks(form, in_blocks.quantize_calibrated(form, weight, grams))
    some = row_blocks(form, in_blocks.quantize_calibrated(form, weight[start:], grams))
    # BLAS may sum in another order, so that one row in fifty has met a tie.
    unlike = (whole[start:] != some).any(axis=(1, 2))
    assert np.count_nonzero(unlike) <= max(1, len(unlike) // 50)


@pytest.mark.parametrize("form", WHOLE_NUMBERS, ids=lambda form: form.name)
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-4, 300.0])
def test_blocks_of_small_and_large_weights_and_of_zeros(form: BlockForm, size: float) -> None:
    """What float16 scales cannot hold becomes 0, and nothing is worse than that."""
    weight = gaussian(3, 512) * np.float32(size)
    weight[:, 256:] = 0
    gram = gram_of(256)
    found = floats_of(form, in_blocks.quantize_calibrated(form, weight, [gram, gram]), 512)
    assert not found[:, 256:].any()
    part = 1.001 if size < 1e-6 else 0.1
    assert loss((found - weight)[:, :256], gram) <= part * loss(weight[:, :256], gram)


def test_what_blocks_of_files_cannot_hold_is_refused() -> None:
    form = FORMS["Q4_K"]
    for bad in (np.nan, np.inf):
        weight = gaussian(40, 300)
        weight[33, 299] = bad
        with pytest.raises(ValueError, match="weight holds NaN or infinity"):
            in_blocks.quantize_calibrated(form, weight, [gram_of(300)])
    with pytest.raises(ValueError, match="codes of IQ4_NL are no whole numbers"):
        in_blocks.quantize_calibrated(FORMS["IQ4_NL"], gaussian(2, 32), [gram_of(32)])
    with pytest.raises(ValueError, match="cut blocks of 256"):
        in_blocks.quantize_calibrated(form, gaussian(2, 512), runs_of(gram_of(512), 128))
    with pytest.raises(ValueError, match=r"floats \[rows, columns\]"):
        in_blocks.quantize_calibrated(form, np.zeros((2, 32), np.int32), [gram_of(32)])
