"""What is told of two programs' logits, and the model that they read."""

from __future__ import annotations

import numpy as np

from edge.demos.bench.gguf_types import SHAPE, compared
from edge.demos.shapes import SHAPES

BLOCK = 256
"""The largest of any type."""


def test_figures_are_those_of_exact_logits_and_of_two_programs() -> None:
    exact = np.array([[[3.0, 0.0, 4.0], [1.0, 2.0, 0.0]]], np.float32)
    near = exact + np.float32(0.1)
    other = exact[..., ::-1].copy()
    found = {each.name: each.values for each in compared({"exact": exact, "a": near, "b": other})}
    assert found["a, same top"] == [100]
    assert found["b, same top"] == [50]
    assert found["a and b, same top"] == [50]
    np.testing.assert_allclose(found["a, distance"], 100 * np.sqrt(6 * 0.01 / 30), rtol=1e-5)
    np.testing.assert_allclose(found["b, distance"], 100 * np.sqrt(4 / 30), rtol=1e-5)


def test_every_type_can_hold_every_matrix() -> None:
    assert not any(columns % BLOCK for _name, (_rows, columns) in SHAPES[SHAPE].matrices())
