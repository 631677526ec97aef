"""The matrices of a layer's experts on a GPU, as one kernel takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.kernels.matmul_nbits.reference import dequantize, quantize
from tests.support.gpu_weights import packed_weight
from tests.support.operator_face import normal
from tests.support.triton_face import array, only_interpreted, tensor


def test_scales_are_float32_where_some_expert_needs_that() -> None:
    """Each matrix is given float16 ones if it can have them; a kernel reads one type."""
    weights = [normal(1, 9, 40), np.float32(1e-6) * normal(2, 9, 40)]
    matrices = [quantize(weight, bits=4, block_size=32) for weight in weights]
    packed = [
        packed_weight(matrix, None, half_scales=half)
        for matrix, half in zip(matrices, (True, False), strict=True)
    ]
    from edge.backends.triton.expert_products import stack_of
    from edge.kernels.experts.triton import expert_product
    from edge.kernels.matmul_nbits.triton import ProductTiles, Weight

    stack = stack_of([Weight(matrix=each) for each in packed])
    x, chosen = normal(3, 1, 40), tensor(np.asarray([[1, 0]], np.int32))
    found = array(expert_product(tensor(x), stack, chosen, tiles=ProductTiles()))
    for row, number in zip(found, (1, 0), strict=True):
        expected = (x @ dequantize(matrices[number]).T)[0]
        assert np.abs(row - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("size", "dtype"), [(1.0, "float16"), (1e-7, "float32"), (1e7, "float32")])
def test_scales_are_float16_unless_one_would_be_lost(size: float, dtype: str) -> None:
    only_interpreted()
    from edge.backends.triton.device import Device
    from edge.backends.triton.weights import gpu_arrays

    matrix = quantize(normal(1, 9, 40) * np.float32(size), bits=4, block_size=32)
    arrays: Any = SimpleNamespace(matrix=lambda _stored: matrix)
    found = gpu_arrays(arrays, SimpleNamespace(name="up"), Device(), is_half=True)  # type: ignore[arg-type]
    assert str(found["scales"].dtype) == f"torch.{dtype}"
    assert np.allclose(array(found["scales"]).T, matrix.scales, rtol=2**-10)
