"""Operators that only towers have compute what their references say."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.kernels.cases import Case
from edge.kernels.patch_attention import onnx as attention_onnx
from edge.kernels.patch_attention import reference as attention_reference
from edge.kernels.patches import onnx as patches_onnx
from edge.kernels.patches import reference as patches_reference
from edge.kernels.position_table import onnx as table_onnx
from edge.kernels.position_table import reference as table_reference
from edge.models.towers.positions import windows
from tests.support.operator_face import FEW, assert_computed, normal

seeds = st.integers(0, 2**32 - 1)


@FEW
@given(
    seed=seeds,
    patches=st.integers(1, 300),
    heads=st.integers(1, 4),
    size=st.sampled_from([2, 8, 64, 72]),
    scale=st.sampled_from([0.05, 1.0]),
)
def test_patch_attention(seed: int, patches: int, heads: int, size: int, scale: float) -> None:
    """Also of large scores, and of more patches than one tile of the operator."""
    q, k, v = normal(seed, 3, 1, patches, heads * size)
    formula = attention_reference.patch_attention
    case = Case.of(formula, q, k, v, num_heads=heads, scale=scale)
    assert_computed(attention_onnx.patch_attention, case, tolerance=1e-5)


@FEW
@given(
    seed=seeds,
    heads=st.integers(1, 3),
    size=st.sampled_from([2, 16]),
    window=st.integers(1, 4),
    blocks=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_window_attention(
    seed: int, heads: int, size: int, window: int, blocks: tuple[int, int]
) -> None:
    """Also of windows with fewer patches at the edges."""
    height, width = (2 * each for each in blocks)
    q, k, v = normal(seed, 3, 1, height * width, heads * size)
    formula = attention_reference.window_attention
    case = Case.of(formula, q, k, v, *windows(2, window, height, width), num_heads=heads, scale=0.3)
    face = partial(attention_onnx.window_attention, width=heads * size)
    assert_computed(face, case, tolerance=1e-5)


@FEW
@given(
    seed=seeds,
    patches=st.integers(1, 20),
    side=st.integers(1, 5),
    outputs=st.integers(1, 9),
    frames=st.sampled_from([1, 2, 3]),
)
def test_embed(seed: int, patches: int, side: int, outputs: int, frames: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (1, patches, 3 * side**2), np.uint8)
    weight = normal(seed, outputs, 3 * frames * side**2)
    terms = np.abs(normal(seed + 1, 3, 1)) / 100, normal(seed + 2, 3, 1)
    apart = normal(seed, frames, outputs, 3 * side**2)
    for own, options in (
        (weight, {"frames": frames}),
        (apart, {"frames": frames, "frames_apart": True}),
        (weight[:, : 3 * side**2], {"channels_last": True}),
    ):
        case = Case.of(
            patches_reference.embed,
            pixels,
            weights=(own, *terms),
            **options,
        )
        assert_computed(partial(patches_onnx.embed, outputs=outputs), case, tolerance=1e-5)


@FEW
@given(
    seed=seeds,
    rows=st.integers(1, 9),
    block=st.sampled_from([1, 4, 9]),
    size=st.integers(1, 9),
    joining=st.sampled_from(["patches", "channels", "mean"]),
)
def test_join(seed: int, rows: int, block: int, size: int, joining: str) -> None:
    x = normal(seed, 1, rows * block, size)
    case = Case.of(patches_reference.join, x, block=block, joining=joining)
    assert_computed(partial(patches_onnx.join, size=size), case)


@FEW
@given(
    seed=seeds,
    table=st.sampled_from(table_reference.TABLES),
    side=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_position_table(seed: int, table: Any, side: int, sizes: tuple[int, int]) -> None:
    height, width = sizes if table == "bilinear" else (min(each, side) for each in sizes)
    places, shares = table_reference.taps(table, side, height, width)
    rows = 2 * side if table == "axes" else side**2
    case = Case.of(
        table_reference.position_table,
        normal(seed, 1, height * width, 5),
        places,
        shares,
        normal(seed + 1, rows, 5),
    )
    face = partial(table_onnx.position_table, taps=table_onnx.TAPS[table])
    assert_computed(face, case)


def test_a_table_between_its_cells() -> None:
    """A plane stays a plane; corners of the tile lie on corners of the table."""
    side = 5
    y, x = np.indices((side, side)).reshape(2, -1)
    places, shares = table_reference.taps("bilinear", side, 3, 9)
    for axis, ends in ((y, np.linspace(0, 4, 3).repeat(9)), (x, np.tile(np.linspace(0, 4, 9), 3))):
        np.testing.assert_allclose((shares * axis[places]).sum(axis=0), ends, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_cells_of_fewer_patches_are_at_equal_fractions(count: int) -> None:
    places, _shares = table_reference.taps("buckets", 12, 1, count)
    assert places[0].tolist() == [number * 12 // count for number in range(count)]
