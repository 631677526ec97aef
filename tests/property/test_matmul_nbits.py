"""The reference of MatMulNBits: exact layout against ONNX Runtime, and slices that sum to it."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edge.kernels.matmul_nbits.reference import (
    LEAST_BLOCK,
    QuantizedMatrix,
    dequantize,
    matmul,
    pack_zero_points,
    quantize,
    slice_columns,
)

FLOAT_DTYPES = [
    np.float32,
    np.float64,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
]


def gaussian(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def run_onnxruntime(
    x: NDArray[np.float32], matrix: QuantizedMatrix, accuracy_level: int
) -> NDArray[np.float32]:
    rows, columns = matrix.shape
    weights = {"codes": matrix.codes, "scales": matrix.scales}
    if matrix.zero_points is not None:
        weights["zero_points"] = pack_zero_points(matrix.zero_points, matrix.bits)
    node = helper.make_node(
        "MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft",
        K=columns, N=rows, bits=matrix.bits, block_size=matrix.block_size,
        accuracy_level=accuracy_level,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "one_product",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["tokens", columns])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["tokens", rows])],
        [
            numpy_helper.from_array(np.ascontiguousarray(values), name)
            for name, values in weights.items()
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    y: NDArray[np.float32] = session.run(None, {"x": x})[0]
    return y


def relative_error(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("columns", [256, 200, 72])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("bits", "block_size"),
    [
        (bits, size)
        for bits in (2, 4, 8)
        for size in (16, 32, 64, 128, 256)
        if bits > 2 or size > 16
    ],
)
def test_onnxruntime_computes_the_reference(
    bits: int, zeros: bool, block_size: int, columns: int, tokens: int, accuracy_level: int
) -> None:
    weight = gaussian(48, columns) + np.float32(zeros / 4)
    matrix = quantize(weight, bits=bits, block_size=block_size, zero_points=zeros)
    x = gaussian(tokens, columns, seed=1)
    error = relative_error(run_onnxruntime(x, matrix, accuracy_level), matmul(x, matrix))
    # Level 4 rounds the activation to int8 per block: measured 5e-3 to 7e-3 for both widths.
    assert error < (1e-6 if accuracy_level == 0 else 1e-2)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_code_means_the_same_to_onnxruntime(bits: int) -> None:
    """All codes at every place of a byte, scales of both signs, against x = unit vectors."""
    columns, size = 1024 if bits == 2 else 256, LEAST_BLOCK[bits]
    codes = np.arange(columns * bits // 8).astype(np.uint8).reshape(1, -1, size * bits // 8)
    scales = np.linspace(-2, 3, columns // size, dtype=np.float32).reshape(1, -1)
    matrix = QuantizedMatrix(
        codes=codes, scales=scales, bits=bits, block_size=size, columns=columns
    )
    got = run_onnxruntime(np.eye(columns, dtype=np.float32), matrix, accuracy_level=0)
    np.testing.assert_allclose(got[:, 0], dequantize(matrix)[0], rtol=1e-6)
    low_first = np.stack(
        [codes.reshape(-1) >> place & (2**bits - 1) for place in range(0, 8, bits)], axis=1
    ).reshape(-1)
    expected = (low_first.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales[0], size)
    np.testing.assert_array_equal(dequantize(matrix)[0], expected)


@given(data=st.data())
def test_a_slice_of_the_columns_sums_to_the_whole_in_onnxruntime(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 4, 8]))
    block_size = max(LEAST_BLOCK[bits], data.draw(st.sampled_from([16, 32, 64])))
    columns = data.draw(st.integers(2, 200))
    cut = data.draw(st.integers(1, columns - 1))
    zeros = data.draw(st.booleans())
    weight = gaussian(5, columns) + np.float32(zeros / 2)
    matrix = quantize(weight, bits=bits, block_size=block_size, zero_points=zeros)
    x = gaussian(2, columns, seed=1)
    total = np.zeros((2, 5), np.float32)
    for part in (range(cut), range(cut, columns)):
        sliced, left_padding = slice_columns(matrix, part)
        values = dequantize(sliced)
        assert left_padding == part.start % block_size
        np.testing.assert_array_equal(
            values[:, left_padding:], dequantize(matrix)[:, part.start : part.stop]
        )
        assert not values[:, :left_padding].any()
        padded = np.pad(x[:, part.start : part.stop], ((0, 0), (left_padding, 0)))
        total += run_onnxruntime(padded, sliced, accuracy_level=0)
        past = codes_past_the_end(sliced)
        np.testing.assert_array_equal(
            past, np.broadcast_to(sliced.zeros(slice(-1, None)), past.shape)
        )
    np.testing.assert_allclose(total, matmul(x, matrix), rtol=1e-4, atol=1e-4)


def codes_past_the_end(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    rows = matrix.codes.reshape(len(matrix.codes), -1)
    bits = matrix.bits
    places = [rows >> place & (2**bits - 1) for place in range(0, 8, bits)]
    rows = np.stack(places, axis=2).reshape(len(rows), -1)
    return rows[:, matrix.columns :]


@given(data=st.data())
def test_a_row_is_quantised_alike_whichever_rows_are_beside_it(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 4, 8]))
    block_size = max(LEAST_BLOCK[bits], data.draw(st.sampled_from([16, 32, 128])))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    threads = data.draw(st.integers(1, 3))
    weight = gaussian(rows, columns).astype(ml_dtypes.bfloat16)
    whole = quantize(weight, bits=bits, block_size=block_size, num_threads=threads)
    part = quantize(weight[start:stop], bits=bits, block_size=block_size)
    np.testing.assert_array_equal(part.codes, whole.codes[start:stop])
    np.testing.assert_array_equal(part.scales, whole.scales[start:stop])


def test_tiles_and_threads_do_not_show_in_the_result() -> None:
    weight = gaussian(300, 2000).astype(ml_dtypes.bfloat16)  # more than one tile per thread
    one = quantize(weight, bits=4, block_size=32, num_threads=1)
    two = quantize(weight, bits=4, block_size=32, num_threads=2)
    row = quantize(weight[299:], bits=4, block_size=32)
    np.testing.assert_array_equal(one.codes, two.codes)
    np.testing.assert_array_equal(one.scales, two.scales)
    np.testing.assert_array_equal(row.codes, one.codes[299:])
    np.testing.assert_array_equal(row.scales, one.scales[299:])


@given(
    bits=st.sampled_from([2, 4, 8]),
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=64),
)
def test_no_weight_is_off_by_more_than_two_steps_of_its_block(
    bits: int, values: list[float]
) -> None:
    weight = np.array([values], np.float32)
    matrix = quantize(weight, bits=bits, block_size=32)
    peaks = np.maximum.reduceat(np.abs(values), range(0, len(values), 32))
    step = np.repeat(peaks, 32)[: len(values)] / 2 ** (bits - 1)
    # Clipping may cost the peak's counterpart two steps. Blocks below 1e-35 become zero.
    error = np.abs(dequantize(matrix)[0] - weight[0].astype(np.float64))
    assert (error <= 2 * step + 1e-34).all()


@pytest.mark.parametrize(
    ("bits", "block_size", "largest_error"),
    [
        (2, 32, 0.115),
        (2, 64, 0.13),
        (2, 128, 0.14),
        (4, 32, 6.8e-3),
        (4, 64, 8.4e-3),
        (4, 128, 9.7e-3),
        (8, 32, 2.9e-5),
    ],
)
def test_mean_squared_error_on_gaussian_weights(
    bits: int, block_size: int, largest_error: float
) -> None:
    weight = gaussian(256, 1024)
    matrix = quantize(weight, bits=bits, block_size=block_size)
    error = np.square(dequantize(matrix) - weight).mean() / np.square(weight).mean()
    assert error < largest_error


def test_the_search_beats_the_q4_0_rule_in_every_block() -> None:
    weight = gaussian(64, 1024)
    blocks = weight.reshape(-1, 32)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = peak / -8
    q4_0 = np.clip(np.floor(blocks / scale + 8.5), 0, 15) - 8
    q4_0_error = np.square(q4_0 * scale - blocks).sum(axis=1)
    matrix = quantize(weight, bits=4, block_size=32)
    error = np.square(dequantize(matrix).reshape(-1, 32) - blocks).sum(axis=1)
    assert (error <= q4_0_error * 1.0001).all()
    assert error.sum() < 0.92 * q4_0_error.sum()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_float_type_is_quantised_as_its_float32_value(dtype: type) -> None:
    weight: NDArray[Any] = gaussian(6, 100).astype(dtype)
    got = quantize(weight, bits=4, block_size=32)
    expected = quantize(weight.astype(np.float32), bits=4, block_size=32)
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales, expected.scales)


def test_a_weight_need_not_be_contiguous() -> None:
    weight = gaussian(64, 40)
    got = quantize(weight.T, bits=8, block_size=32)
    np.testing.assert_array_equal(got.codes, quantize(weight.T.copy(), bits=8, block_size=32).codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_stay_zero(bits: int) -> None:
    matrix = quantize(np.zeros((3, 70), np.float16), bits=bits, block_size=32)
    assert not matrix.scales.any()
    assert not dequantize(matrix).any()
    assert set(matrix.codes.reshape(-1).tolist()) == {{2: 0xAA, 4: 0x88, 8: 0x80}[bits]}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused(bad: float, dtype: type) -> None:
    weight: NDArray[Any] = gaussian(40, 72)
    weight[33, 71] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight.astype(dtype), bits=4, block_size=32)


def test_a_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(np.full((1, 32), 1e300), bits=4, block_size=32)


@pytest.mark.parametrize(
    ("weight", "bits", "block_size", "message"),
    [
        (np.zeros((2, 2), np.float32), 3, 32, "3 bits"),
        (np.zeros((2, 2), np.float32), 4, 24, "blocks of 24"),
        (np.zeros((2, 2), np.float32), 2, 16, "blocks of 16 weights of 2 bits .* 32 or more"),
        (np.zeros(2, np.float32), 4, 32, "rows and columns"),
        (np.zeros((2, 0), np.float32), 4, 32, "rows and columns"),
        (np.zeros((2, 2), np.int32), 4, 32, "int32"),
    ],
)
def test_what_cannot_be_quantised_is_said(
    weight: NDArray[np.float32], bits: int, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(weight, bits=bits, block_size=block_size)


@pytest.mark.parametrize("run", [range(3, 3), range(-1, 2), range(0, 9), range(0, 8, 2)])
def test_slices_outside_the_matrix_are_refused(run: range) -> None:
    matrix = quantize(gaussian(8, 8), bits=4, block_size=16)
    with pytest.raises(ValueError, match="not a run"):
        slice_columns(matrix, run)


def test_shapes_that_contradict_each_other_are_refused() -> None:
    good = quantize(gaussian(8, 64), bits=4, block_size=32)
    with pytest.raises(ValueError, match="codes are"):
        QuantizedMatrix(codes=good.codes, scales=good.scales, bits=8, block_size=32, columns=64)
    with pytest.raises(ValueError, match="scales are"):
        QuantizedMatrix(
            codes=good.codes, scales=good.scales[:, :1], bits=4, block_size=32, columns=64
        )


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_zero_points_lose_less_where_blocks_lean_to_a_side(block_size: int) -> None:
    """And no more where they do not."""
    for shift, most in ((0.0, 1.0), (0.5, 0.85), (2.0, 0.42)):
        weight = gaussian(64, 512) + np.float32(shift)
        errors = []
        for zeros in (True, False):
            matrix = quantize(weight, bits=4, block_size=block_size, zero_points=zeros)
            errors.append(float(((dequantize(matrix) - weight) ** 2).mean()))
        assert errors[0] < most * errors[1]


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30, 3e38])
def test_blocks_of_one_value_have_zero_points(value: float) -> None:
    weight = np.full((3, 80), value, np.float32)
    matrix = quantize(weight, bits=4, block_size=32, zero_points=True)
    np.testing.assert_allclose(dequantize(matrix), weight, rtol=1e-6)


def test_what_is_no_number_has_no_zero_point() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(np.array([[1.0, np.nan]], np.float32), bits=4, block_size=16, zero_points=True)
