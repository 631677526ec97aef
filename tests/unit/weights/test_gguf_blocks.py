"""Blocks of a GGUF file, as kernels are given them, stand for the very same weights."""

from __future__ import annotations

import numpy as np
import pytest

from edge.kernels.matmul_nbits.reference import dequantize
from edge.offload import BLOCK_TYPES
from edge.weights.gguf.blocks import as_matrix
from tests.support.gguf_files import Type, raw_blocks

CODED = [number for number, block in BLOCK_TYPES.items() if block.coded is not None]


@pytest.mark.parametrize("number", CODED, ids=lambda number: BLOCK_TYPES[number].name)
def test_they_stand_for_the_same_weights(number: int) -> None:
    """To the last bit, but where an offset takes in half of the codes' range."""
    block = BLOCK_TYPES[number]
    values = np.random.default_rng(number).standard_normal((5, 768)).astype(np.float32)
    raw = raw_blocks(values, Type(number)).reshape(5, -1, block.block_bytes)
    expected = block.dequantize(raw)
    matrix = as_matrix(block, raw)
    assert matrix.shape == (5, 768)
    assert block.coded is not None
    assert (matrix.offsets is not None) == block.coded.has_offsets
    largest = np.abs(matrix.scales).max() * matrix.zero_code
    tolerance = 1e-6 * largest if block.coded.shift else 0
    np.testing.assert_allclose(dequantize(matrix), expected, rtol=0, atol=tolerance)
    assert np.std(expected) > 0.1
