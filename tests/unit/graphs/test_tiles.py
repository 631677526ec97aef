"""Tiles of pictures: where they lie, and what they are put together to."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import RequestError
from edge.graphs.onnx_file import GraphValue
from edge.graphs.tiles import Merged, TiledPicture, TilePlan, TileSize, picture_axes, spans, step_of


@given(
    length=st.integers(1, 700),
    size=st.integers(16, 256),
    overlap=st.integers(0, 128),
    step=st.sampled_from((1, 2, 8, 32)),
    grain=st.sampled_from((1, 2, 8)),
)
def test_tiles_cover_all_pixels_and_overlap(
    length: int, size: int, overlap: int, step: int, grain: int
) -> None:
    rounded = size if size < 64 else size // 64 * 64
    tile = TileSize.checked((size, min(overlap, rounded // 2)))
    if tile.size - tile.overlap < step or step % grain:
        return
    found = spans(length, tile, step, grain)
    assert len(found) <= max(1, -(-length // (tile.size - tile.overlap - step + 1)))
    assert found[0].start == found[0].first == 0
    assert found[-1].stop == found[-1].last == length
    for one, other in itertools.pairwise(found):
        assert one.last == other.first
        assert one.stop - other.start >= tile.overlap
        assert one.stop - one.last >= tile.overlap // 2
        assert other.first - other.start >= tile.overlap // 2 - grain
    for each in found:
        assert each.start % step == each.first % grain == 0
        assert each.start <= each.first < each.last <= each.stop <= length
        assert each.stop - each.start <= tile.size


@given(
    height=st.integers(20, 90),
    width=st.integers(20, 90),
    scale=st.sampled_from((Fraction(1), Fraction(3), Fraction(1, 4))),
)
def test_a_picture_is_put_together_again(height: int, width: int, scale: Fraction) -> None:
    """By a function of which each pixel depends on itself alone."""

    def scaled(picture: np.ndarray) -> np.ndarray:
        if scale < 1:
            return picture[:, :, :: scale.denominator, :: scale.denominator]
        return picture.repeat(scale.numerator, 2).repeat(scale.numerator, 3)

    tiling = TilePlan(
        tile=TileSize(24, 8),
        axes={"x": (2, 3)},
        step=4,
        merged={"y": Merged((2, 3), scale)},
        rests=(height % 4, width % 4),
    )
    whole = np.arange(2 * height * width, dtype=np.float32).reshape(1, 2, height, width)
    inputs: dict[str, np.ndarray] = {"x": whole, "strength": np.ones(1)}
    picture = TiledPicture(inputs, tiling)
    for rows, columns in tiling.tiles((height, width)):
        part = picture.inputs_of(rows, columns)
        assert part["strength"] is inputs["strength"]
        picture.take(rows, columns, {"y": scaled(part["x"])})
    assert np.array_equal(picture.results()["y"], scaled(whole))


def test_pictures_and_their_steps_are_recognised() -> None:
    def value(*shape: int | str | None) -> GraphValue:
        return GraphValue(name="x", dtype="float32", shape=shape)

    assert picture_axes(value(1, 3, "h", "w")) == (2, 3)
    assert picture_axes(value("n", 3, None, None)) == (2, 3)
    assert picture_axes(value(None, "h", "w", 3)) == (1, 2)
    assert picture_axes(value("h", "w", 3)) == (0, 1)
    assert picture_axes(value(1, 3, 224, 224)) is None
    assert picture_axes(value("n", "tokens")) is None
    assert step_of([(1, 3, 64, 64), (1, 8, 16, 16), (1, 8, 1, 1)], TileSize(64, 0)) == 4
    sizes = (64, 64), (128, 96)
    seen = Merged.seen("y", sizes, ((1, 2, 16, 16), (1, 2, 32, 24)))
    assert seen == Merged((2, 3), Fraction(1, 4))
    for shapes in (((1, 5), (1, 5)), ((1, 16, 16), (1, 32, 26)), ((1, 2), (1, 2, 3))):
        with pytest.raises(RequestError, match="cannot be put together"):
            Merged.seen("y", sizes, shapes)


@pytest.mark.parametrize(
    "asked", [(512,), "512,64", (512.0, 64), (8, 0), (64, 40), (64, -1), (127, 63)]
)
def test_wrong_tiles_are_refused(asked: object) -> None:
    with pytest.raises(RequestError, match="tiles"):
        TileSize.checked(asked)
    with pytest.raises(RequestError, match="too small for this graph"):
        spans(500, TileSize(32, 16), 32, 1)
