"""Floats rounded to the blocks of files, against the rounding of the format's own library."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import (
    FORMS,
    BlockForm,
    dequantize,
)
from edge.weights.block_rounding import BlockRounding

WHOLE = [form for form in FORMS.values() if not form.has_table]
forms = pytest.mark.parametrize("form", WHOLE, ids=[form.name for form in WHOLE])
LARGEST_ERROR = {2: 0.29, 3: 0.15, 4: 0.086, 5: 0.044, 6: 0.018, 8: 0.0054}
"""Root mean square of the error of normal weights, to theirs; by bits."""


def rounded(form: BlockForm, weights: NDArray[np.generic]) -> NDArray[np.float32]:
    arrays, largest = BlockRounding(form).rounded(weights)
    found = dequantize(form, arrays["blocks"])
    assert np.abs(found).max(initial=0) <= largest
    return found[:, : weights.shape[1]]


def error(found: NDArray[np.float32], weights: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.square(found - weights).mean() / np.square(weights).mean()))


@forms
def test_weights_are_close(form: BlockForm) -> None:
    weights = np.random.default_rng(0).normal(size=(33, 600)).astype(np.float32)
    assert error(rounded(form, weights), weights) < LARGEST_ERROR[form.bits]


@pytest.mark.parametrize("size", [2e-3, 2e-4, 2e-5])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_small_weights_lose_no_more_than_steps_of_their_scales(name: str, size: float) -> None:
    """Scales of levels are among the smallest numbers of a float16, 6e-8 apart."""
    form = FORMS[name]
    weights = size * np.random.default_rng(3).normal(size=(16, 512)).astype(np.float32)
    steps = 6e-8 * (1 << form.bits) / size
    assert error(rounded(form, weights), weights) < LARGEST_ERROR[form.bits] + steps


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_are_closer_than_by_the_library_of_the_format(name: str) -> None:
    weights = np.random.default_rng(1).standard_t(4, size=(64, 320)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
    assert error(rounded(FORMS[name], weights), weights) < error(theirs, weights)


@forms
def test_a_block_depends_on_its_own_weights_alone(form: BlockForm) -> None:
    weights = np.random.default_rng(2).normal(size=(9, 512)).astype(np.float32)
    whole = BlockRounding(form).rounded(weights)[0]["blocks"]
    for row in (0, 3, 8):
        alone = BlockRounding(form).rounded(weights[row : row + 1, :256])[0]["blocks"]
        np.testing.assert_array_equal(alone[0], whole[row, : 256 // form.block_size])


@forms
def test_zeros_and_single_numbers_are_exact(form: BlockForm) -> None:
    weights = np.zeros((3, form.block_size), np.float32)
    weights[1] = -0.5
    found = rounded(form, weights)
    np.testing.assert_array_equal(found[[0, 2]], 0)
    np.testing.assert_allclose(found[1], -0.5, rtol=2e-3)


@forms
def test_weights_that_are_multiples_of_a_scale_come_back(form: BlockForm) -> None:
    """All codes of one scale for a block; its minimum, where there is one, is the least of them."""
    codes = (np.arange(form.block_size) % (1 << form.bits)).astype(np.uint8)
    weights = form.values(codes).astype(np.float32)[None] / 64
    np.testing.assert_allclose(rounded(form, weights), weights, atol=8e-3 * np.abs(weights).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    weights = np.zeros((2, 32), np.float32)
    weights[1, 7] = value
    with pytest.raises(ValueError, match="finite"):
        BlockRounding(FORMS["Q5_0"]).rounded(weights)


def test_weights_that_no_scale_holds_are_told_by_their_size() -> None:
    weights = np.full((1, 256), 1e12, np.float32)
    weights[0, ::2] = -1e12
    _arrays, largest = BlockRounding(FORMS["Q6_K"]).rounded(weights)
    assert not np.isfinite(largest)
