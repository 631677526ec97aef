"""Products with the blocks of GGUF files: against numpy, and bit for bit among processors."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
from edge_kernels import LIBRARY, kernels
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import (
    FORMS,
    TILE_ROWS,
    BlockForm,
    BlockParts,
    dequantize,
    parts_of,
    rounded_inputs,
    row_blocks,
    rows_of,
    tiles,
)
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.offload import BLOCK_TYPES
from edge.weights.block_rounding import largest_weight
from edge.weights.file_blocks import FileBlocks
from edge.weights.gguf.file_blocks import read_blocks
from tests.support.block_rows import open_chosen, open_product, product, random_rows

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
NAMES = ("plain", "avx2", "avx_vnni", "avx512")


def inputs(count: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(count, columns)).astype(np.float32)


def by_kernels(
    name: str, form: BlockForm, rows: NDArray[np.uint8], x: NDArray[np.float32]
) -> NDArray[np.float32] | None:
    """The product with sixteen rows by the kernels of this name; None: not of this processor."""
    found = np.zeros((len(x), TILE_ROWS), np.float32)
    tile = tiles(form, rows)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (tile, x, found))
    at_tile, at_x, at_found = pointers
    there = ctypes.CDLL(str(LIBRARY)).edge_kernels_try(
        name.encode(), form.number, at_tile, ctypes.c_size_t(1), ctypes.c_size_t(x.shape[1]), at_x,
        ctypes.c_size_t(len(x)), None, ctypes.c_size_t(len(x)), at_found,
    )  # fmt: skip
    return found if there else None


@forms
def test_blocks_of_a_file_keep_their_weights(form: BlockForm) -> None:
    """The values that the format's own library reads."""
    (block,) = (each for each in BLOCK_TYPES.values() if each.name == form.name)
    kind = gguf.GGMLQuantizationType[form.name]
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (5, 2, block.block_bytes), np.uint8)
    if form.has_float_levels:
        each = form.block_size // block.block_size
        raw = random.integers(0, 256, (5, 2 * each, block.block_bytes), np.uint8)
    elif form.has_power:
        raw[..., 0] = (0, 1), (2, 3), (4, 127), (128, 200), (247, 100)
    else:
        halves = raw.view(np.float16)
        halves[np.abs(halves) > 10] = 0.5  # no quantiser writes NaN
        halves[np.isnan(halves)] = 0.5
    meant = gguf.quants.dequantize(raw.reshape(5, -1), kind)
    parts = read_blocks(form, block, raw)
    found = dequantize(form, rows_of(form, tiles(form, row_blocks(form, parts))))
    np.testing.assert_array_equal(found[:5], meant)
    assert np.abs(meant).max() <= largest_weight(form, parts)
    most = 1.2 if form.name == "Q2_K" else 1.04
    assert form.bytes_per_weight * block.block_size <= most * block.block_bytes


@pytest.mark.parametrize("name", [form.name for form in FORMS.values() if form.grid is not None])
def test_every_point_of_a_grid_is_the_one_of_the_format(name: str) -> None:
    form = FORMS[name]
    assert form.grid is not None
    known = getattr(gguf.quants, name)
    known.init_grid()
    points = form.grid.points
    repeated = np.resize(points, max(points.size, TILE_ROWS * form.block_size))
    codes = repeated.reshape(TILE_ROWS, -1, form.block_size)
    blocks = codes.shape[:2]
    parts = BlockParts(
        codes=codes,
        scales=np.full(blocks, 1 / form.grid.share, np.float16),
        levels=np.ones((*blocks, form.block_size // form.run), np.uint8),
    )
    rows, half = row_blocks(form, parts), 2 if name == "IQ3_XXS" else 1
    weights = dequantize(form, rows)
    found = half * weights.reshape(-1, form.grid.columns)[: len(points)]
    np.testing.assert_array_equal(found, known.grid.reshape(points.shape))
    y = by_kernels(kernels(), form, rows, np.eye(weights.shape[1], dtype=np.float32))
    assert y is not None
    np.testing.assert_allclose(y.T, weights, rtol=1e-6)


@given(st.sampled_from(list(FORMS.values())), st.integers(1, 40), st.integers(1, 700))
def test_tiles_are_rows_again(form: BlockForm, rows: int, columns: int) -> None:
    made = random_rows(form, rows, columns)
    assert made.shape[2] == form.row_bytes
    found = tiles(form, made)
    (stored,) = FileBlocks(form.name).arrays(rows, columns)
    assert found.shape == stored.shape
    np.testing.assert_array_equal(rows_of(form, found)[:rows], made)
    np.testing.assert_array_equal(row_blocks(form, parts_of(form, made)), made)


@forms
def test_every_processor_computes_the_same_bits(form: BlockForm) -> None:
    rows, x = random_rows(form, TILE_ROWS, 768), inputs(15, 700)
    x[3], x[4, 5], x[5] = 0, np.inf, x[5] * 1e-36
    plain = by_kernels("plain", form, rows, x)
    assert plain is not None
    assert np.isnan(plain[4]).all()
    assert not plain[3].any()
    named = {name: by_kernels(name, form, rows, x) for name in NAMES}
    assert named[kernels()] is not None
    for found in named.values():
        if found is not None:
            np.testing.assert_array_equal(found, plain)


@forms
@pytest.mark.parametrize(("rows", "columns", "threads"), [(16, 256, 1), (37, 300, 2), (700, 64, 2)])
def test_the_operator_computes_the_formula(
    form: BlockForm, rows: int, columns: int, threads: int
) -> None:
    made, x = random_rows(form, rows, columns), inputs(9, columns)
    weights = dequantize(form, made)[:, :columns].astype(np.float64)
    meant = rounded_inputs(x).astype(np.float64) @ weights.T
    fast = product(form, made, x, threads=threads)
    np.testing.assert_allclose(fast, meant, atol=1e-6 * np.abs(meant).max())
    exact = x.astype(np.float64) @ weights.T
    high = product(form, made, x, accuracy="high", threads=threads)
    assert np.linalg.norm(high - exact) < 4e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("accuracy", ["fast", "high"])
def test_a_row_is_the_same_beside_any_others(accuracy: str) -> None:
    form = FORMS["Q4_K"]
    made, x = random_rows(form, 40, 512), inputs(35, 512)
    whole = product(form, made, x, accuracy=accuracy)
    for count in (1, 2, 3, 7, 16, 17):
        np.testing.assert_array_equal(
            product(form, made, x[:count], accuracy=accuracy), whole[:count]
        )


def test_blocks_may_be_exchanged_under_a_session() -> None:
    form = FORMS["Q6_K"]
    session = open_product(form, np.empty(0, np.uint8), rows=20, columns=256, holds=False)
    x = inputs(3, 256)
    for seed in (1, 2):
        made = random_rows(form, 20, 256, seed)
        found = session.run(None, {"x": x[None], "blocks": tiles(form, made)})[0][0]
        np.testing.assert_array_equal(found, product(form, made, x))


def test_what_does_not_fit_is_refused() -> None:
    form = FORMS["Q4_0"]
    made = tiles(form, random_rows(form, 16, 64))
    session = open_product(form, made, rows=16, columns=64)
    with pytest.raises(Exception, match="another number of columns"):
        session.run(None, {"x": inputs(1, 65)[None]})
    with pytest.raises(Exception, match="blocks of another size"):
        open_product(form, made[:, :-1], rows=16, columns=64)
    loose = open_product(form, made, rows=16, columns=64, holds=False)
    with pytest.raises(Exception, match="blocks of another size"):
        loose.run(None, {"x": inputs(1, 64)[None], "blocks": made[:, :-1]})
    for changed in ({"number": 99}, {"number": -1}):
        unknown = type("Unknown", (), {**changed})()
        with pytest.raises(Exception, match="unknown type"):
            open_product(unknown, made, rows=16, columns=64)


@pytest.mark.parametrize(("accuracy", "threads"), [("fast", 2), ("high", 1)])
@pytest.mark.parametrize(("tokens", "each"), [(1, 4), (9, 1), (40, 3)])
def test_each_use_is_multiplied_with_the_matrix_that_it_chose(
    accuracy: Accuracy, threads: int, tokens: int, each: int
) -> None:
    """With the bits of a product with that matrix alone; 0 where none was chosen."""
    form, x = FORMS["Q5_K"], inputs(tokens, 300)
    matrices = [random_rows(form, 37, 300, seed) for seed in range(5)]
    session = open_chosen(form, matrices, columns=300, accuracy=accuracy, threads=threads)
    chosen = np.random.default_rng(2).integers(-1, len(matrices), tokens * each)
    chosen[chosen == 3] = 0  # nobody chose it
    found = session.run(None, {"x": x[None], "chosen": chosen})[0][0]
    assert found.shape == (tokens * each, 37)
    alone = [product(form, rows, x, accuracy=accuracy) for rows in matrices]
    for use, number in enumerate(chosen):
        meant = np.zeros(37, np.float32) if number < 0 else alone[number][use // each]
        np.testing.assert_array_equal(found[use], meant)


def test_numbers_of_no_matrix_and_unequal_uses_are_refused() -> None:
    form, x = FORMS["Q8_0"], inputs(2, 64)[None]
    session = open_chosen(form, [random_rows(form, 16, 64)] * 3, columns=64)
    for chosen in ([0, 3], [-2, 0], [0, 1 << 62]):
        with pytest.raises(Exception, match="number of a matrix that is not there"):
            session.run(None, {"x": x, "chosen": np.asarray(chosen, np.int64)})
    with pytest.raises(Exception, match="unequal numbers of uses"):
        session.run(None, {"x": x, "chosen": np.zeros(3, np.int64)})
    nothing = {"x": x[:, :0], "chosen": np.zeros(0, np.int64)}
    assert session.run(None, nothing)[0].shape == (1, 0, 16)
    other = [random_rows(form, 16, columns) for columns in (64, 32)]
    with pytest.raises(Exception, match="blocks of another size"):
        open_chosen(form, other, columns=64)


@given(st.data())
def test_some_rows_of_a_matrix(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(list(FORMS.values())))
    made = random_rows(form, 50, 256)
    kind, stored = FileBlocks(form.name), tiles(form, made)
    rows = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=20))
    found = kind.some_rows(lambda _suffix, places: stored[list(places or ())], rows)
    weights = kind.floats(found.__getitem__, 200)[: len(rows)]
    np.testing.assert_array_equal(weights, dequantize(form, made)[rows, :200])
