"""Quantised matrices with zero points, in numpy and as GPU kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul import reference as matmul_reference
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, dequantize
from tests.support.triton_face import TOLERANCES, array, tensor


def zero_points(seed: int, matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """Near the middle, so that sums stay as large as those of a symmetric weight."""
    around = np.random.default_rng(seed).integers(-3, 4, matrix.scales.shape)
    return (matrix.zero_code + around).astype(np.uint8)


def with_zero_points(
    matrix: QuantizedMatrix, scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None
) -> NDArray[np.float32]:
    """Σ over blocks: the symmetric weight, and what the zero points move each block by."""
    unit = QuantizedMatrix(
        codes=matrix.codes, scales=np.ones_like(matrix.scales), bits=matrix.bits,
        block_size=matrix.block_size, columns=matrix.columns,
    )  # fmt: skip
    block = np.arange(matrix.columns) // matrix.block_size
    codes = dequantize(unit) + matrix.zero_code
    zero = np.float32(matrix.zero_code) if zeros is None else zeros[:, block].astype(np.float32)
    product: NDArray[np.float32] = (codes - zero) * scales[:, block]
    return product


def packed_weight(
    matrix: QuantizedMatrix, zeros: NDArray[np.uint8] | None, *, half_scales: bool = False
) -> Any:
    """On the device, each array between poison."""
    import torch

    from edge.kernels.matmul_nbits.gpu_layout import arranged
    from edge.kernels.matmul_nbits.triton import PackedWeight

    scales = matrix.scales.T.astype(np.float16 if half_scales else np.float32)
    return PackedWeight(
        words=tensor(arranged(torch.from_numpy(matrix.codes), matrix.bits).numpy()),
        scales=tensor(scales),
        zero_points=None if zeros is None else tensor(zeros.T),
        bits=matrix.bits, block_size=matrix.block_size, columns=matrix.columns,
    )  # fmt: skip


def assert_near(
    actual: Any, x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, dtype: str
) -> None:
    """Within the tolerance of |x| |w|: what a sum of rounded products can lose."""
    expected = matmul_reference.matmul(x, weight, bias)
    assert str(actual.dtype) == f"torch.{dtype}"
    size = np.linalg.norm(x, axis=-1)[:, None] * np.linalg.norm(weight, axis=-1)
    size = size + np.abs(expected) + (0 if bias is None else np.abs(bias))
    assert (np.abs(array(actual) - expected) <= TOLERANCES[dtype] * size + 1e-6).all()
