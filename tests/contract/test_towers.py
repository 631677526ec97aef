"""Towers give the rows that `transformers` gives, from checkpoints as people have them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edge.backends.interface import TowerProgram
from edge.backends.onnx import self_check
from edge.backends.registry import open_tower
from edge.errors import RequestError
from edge.kernels.patch_attention.onnx import patch_attention
from edge.models.towers.part import TowerPart
from edge.weights.checkpoint import Checkpoint
from edge.weights.tower import tower_format
from tests.support.processes import run_module
from tests.support.towers import (
    GRIDS,
    expected_rows,
    format_of,
    make_tower_model,
    random_tile,
    shipped_tower,
)


@pytest.mark.parametrize("name", GRIDS)
def test_rows_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    """In float32 nearly the same, in int8 alike."""
    run_module(__name__, name, tmp_path)


def test_an_operator_that_computes_wrongly_is_refused(tmp_path: Path) -> None:
    run_module(__name__, "wrong", tmp_path)


def _load_with_a_wrong_operator(folder: Path) -> None:
    make_tower_model(folder, "smolvlm")

    def wrong(*arguments: Any, scale: float, **options: Any) -> str:
        return patch_attention(*arguments, scale=1.1 * scale, **options)

    with Checkpoint.open(folder) as checkpoint, patch.object(self_check, "patch_attention", wrong):
        tower = checkpoint.tower
        assert tower is not None
        part = TowerPart.whole(tower)
        weights = shipped_tower(checkpoint, folder, "float32", part)
        chosen = tower_format(tower, format_of(checkpoint, "float32"))
        with pytest.raises(RequestError, match="attention of patches"):
            open_tower(part, weights, chosen, backend="ort", threads=1)


def _compare(name: str, folder: Path) -> None:
    model = make_tower_model(folder, name)
    with Checkpoint.open(folder) as checkpoint:
        tower = checkpoint.tower
        assert tower is not None
        for dtype, allowed in (("float32", 2e-5), ("int4", 0.05)):
            program = _opened(checkpoint, folder, dtype, TowerPart.whole(tower))
            for height, width in GRIDS[name]:
                tile = random_tile(height, width, tower.patch_size)
                found, expected = program.read(tile), expected_rows(name, model, tile)
                assert found.shape == expected.shape
                assert found.shape[-2] == tower.rows(height, width)
                error = np.abs(found - expected).max() / np.abs(expected).max()
                assert error < allowed, (dtype, height, width, error)
            if not tower.deep_layers:
                _compare_cut(name, checkpoint, folder, dtype, program)
            program.close()


def _opened(checkpoint: Checkpoint, folder: Path, dtype: str, part: TowerPart) -> TowerProgram:
    weights = shipped_tower(checkpoint, folder, dtype, part)
    chosen = tower_format(part.tower, format_of(checkpoint, dtype))
    return open_tower(part, weights, chosen, backend="ort", threads=1)


def _compare_cut(
    name: str, checkpoint: Checkpoint, folder: Path, dtype: str, whole: TowerProgram
) -> None:
    """A tower cut behind each of its layers gives the same rows, to the last bit."""
    tower = checkpoint.tower
    assert tower is not None
    count = tower.encoder.num_layers
    parts = [TowerPart(tower=tower, layers=range(n, n + 1)) for n in range(count)]
    first, *others = (_opened(checkpoint, folder, dtype, part) for part in parts)
    for height, width in GRIDS[name]:
        tile = random_tile(height, width, tower.patch_size)
        found = first.read(tile)
        for each in others:
            found = each.go_on(found, height, width)
        np.testing.assert_array_equal(found, whole.read(tile))
    for each in (first, *others):
        each.close()


if __name__ == "__main__":
    if sys.argv[1] == "wrong":
        _load_with_a_wrong_operator(Path(sys.argv[2]))
    else:
        _compare(sys.argv[1], Path(sys.argv[2]))
