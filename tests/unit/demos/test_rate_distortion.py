"""Noise of so many bits: it has the rates that it says, and loses what the bound says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.demos.bench.rate_distortion import rotated, water_levels

Array = NDArray[np.float32]
ROWS, COLUMNS = 300, 200


def gaussian(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def gram(size: int, seed: int) -> Array:
    """E[x x^T] of inputs that are unlike each other."""
    sizes = np.exp(gaussian(size, seed=seed))
    x = gaussian(2 * size, size, seed=seed + 1) * sizes
    return np.asarray(x.T @ x / len(x), np.float32)


WEIGHT = gaussian(ROWS, COLUMNS, seed=1)
INPUTS, OUTPUTS = gram(COLUMNS, 2), np.exp(gaussian(ROWS, seed=4))
_VALUES, _VECTORS = np.linalg.eigh(INPUTS)


def loss(error: Array) -> float:
    """tr(G E H E^T) / 2; a fifth of G is the same for all outputs."""
    shared = 0.8 * OUTPUTS + 0.2 * OUTPUTS.mean()
    return float(shared @ np.diag(error @ INPUTS @ error.T)) / 2


@pytest.mark.parametrize("bits", [2.0, 3.5])
def test_an_entry_loses_the_water_level_or_all_it_has(bits: float) -> None:
    matrix = rotated(WEIGHT, (_VALUES, _VECTORS), OUTPUTS)
    (level,) = water_levels([matrix], [bits])
    rates = np.maximum(0, matrix.doublings() - np.float32(level)) / 2
    assert float(rates.mean()) == pytest.approx(bits, abs=0.001)
    found = loss(matrix.noisy(rates, np.random.default_rng(6)) - WEIGHT)
    assert found == pytest.approx(
        float(np.exp2(np.minimum(matrix.doublings(), level)).sum()), rel=0.05
    )
    # The same rate for all entries of the same matrix loses more.
    plain = rotated(WEIGHT)
    same = plain.noisy(np.full(WEIGHT.shape, bits, np.float32), np.random.default_rng(6))
    assert found < loss(same - WEIGHT) / 4


def test_levels_are_of_all_matrices_together() -> None:
    matrices = [rotated(WEIGHT * scale, (_VALUES, _VECTORS), OUTPUTS) for scale in (1, 8)]
    (level,) = water_levels(matrices, [4.0])
    fewer, more = (float((np.maximum(0, each.doublings() - level) / 2).mean()) for each in matrices)
    assert (fewer + more) / 2 == pytest.approx(4, abs=0.001)
    assert more - fewer == pytest.approx(3, abs=0.3)  # 8 times as large: 3 bits more


def test_without_knowledge_it_is_the_noise_of_a_gaussian() -> None:
    found = rotated(WEIGHT).noisy(np.full(WEIGHT.shape, 3, np.float32), np.random.default_rng(6))
    assert float(np.square(found - WEIGHT).mean()) == pytest.approx(2**-6, rel=0.05)
    assert float((found * WEIGHT).mean()) == pytest.approx(1 - 2**-6, rel=0.05)
