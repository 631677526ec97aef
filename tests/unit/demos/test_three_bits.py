"""Codes that no kernel has, simulated: more bits lose less, and as much as theory says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.demos.bench.three_bits import (
    Inputs,
    Kind,
    allotted,
    in_even_steps,
    losses_by_kind,
    mean_bits,
    rounded,
)

Array = NDArray[np.float32]
ROWS, COLUMNS = 300, 128


def gaussian(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


_X = gaussian(2000, COLUMNS, seed=1) @ gaussian(COLUMNS, COLUMNS, seed=2)
GRAM = np.asarray(_X.T @ _X / len(_X), np.float32)
WEIGHT, SQUARES = gaussian(ROWS, COLUMNS, seed=3), np.exp(gaussian(ROWS, seed=4))


def loss(error: Array) -> float:
    return 0.5 * float(np.einsum("rc,rc->r", error @ GRAM, error) @ SQUARES)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_bit_more_loses_about_a_fourth(size: int) -> None:
    inputs = Inputs(GRAM)
    two, three, four = (
        loss(WEIGHT - rounded(WEIGHT, inputs, Kind(bits, size))) for bits in (2, 3, 4)
    )
    assert 3 < two / three < 7
    assert 3 < three / four < 7


def test_what_inputs_are_like_counts() -> None:
    """Plain rounding, as of inputs that are all alike, loses more of what these inputs make."""
    kind = Kind(3, 64)
    known = rounded(WEIGHT, Inputs(GRAM), kind)
    unknown = rounded(WEIGHT, Inputs(np.eye(COLUMNS, dtype=np.float32)), kind)
    assert loss(WEIGHT - known) < 0.7 * loss(WEIGHT - unknown)
    assert np.linalg.norm(WEIGHT - known) > np.linalg.norm(WEIGHT - unknown)


def test_a_block_has_no_more_codes_than_its_bits() -> None:
    made = rounded(WEIGHT, Inputs(GRAM), Kind(3, 64))
    assert max(len(np.unique(row[:64])) for row in made) == 8


def test_even_steps_lose_what_they_are_thought_to() -> None:
    inputs = Inputs(GRAM)
    (coarse, few), (fine, many) = (
        in_even_steps(WEIGHT, inputs, SQUARES, each) for each in (8.0, 2.0)
    )
    assert loss(WEIGHT - fine) / WEIGHT.size == pytest.approx(2 / 12, rel=0.4)
    assert loss(WEIGHT - coarse) / loss(WEIGHT - fine) == pytest.approx(4, rel=0.2)
    assert (many - few) / WEIGHT.size == pytest.approx(1, abs=0.1)


def test_bits_go_where_they_pay() -> None:
    losses = losses_by_kind(WEIGHT, Inputs(GRAM), SQUARES)
    of = {"matters": {kind: 100 * each for kind, each in losses.items()}, "does not": losses}
    sizes = dict.fromkeys(of, WEIGHT.size)
    found = allotted(of, sizes, 3.5)
    assert mean_bits(found, sizes) <= 3.5
    assert found["matters"].bits > found["does not"].bits
