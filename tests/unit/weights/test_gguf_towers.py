"""The mmproj file beside a GGUF model has the tower that the folder has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import CheckpointError
from edge.models.spec import ModelSpec
from edge.models.towers.part import TowerPart
from edge.weights.checkpoint import Checkpoint
from edge.weights.float_matrices import FloatSource
from edge.weights.formats import weight_format
from edge.weights.gguf.tower import tower_beside
from edge.weights.tower import TowerForm, check_tower, tower_format, tower_layout
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.mmproj_files import NAMES, write_mmproj
from tests.support.towers import make_tower_model


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / str(request.param)
    make_tower_model(path, path.name)
    return path


def source(form: TowerForm) -> FloatSource:
    return FloatSource(form.store, form.tensor_name)


def read(path: Path, model: ModelSpec) -> TowerForm:
    form = tower_beside(path, model)
    assert form is not None
    check_tower(form, path)
    return form


@pytest.mark.parametrize("swapped", [False, True])
def test_every_weight_is_that_of_the_folder(folder: Path, tmp_path: Path, swapped: bool) -> None:
    write_mmproj(folder, folder.name, tmp_path / "mmproj-F32.gguf", swapped=swapped)
    with Checkpoint.open(folder) as checkpoint:
        form, own = read(tmp_path / "model.gguf", checkpoint.spec), checkpoint._tower
        assert own is not None
        assert form.tower.rows(6, 6) == own.tower.rows(6, 6)
        assert form.tower.deep_layers == own.tower.deep_layers
        assert form.tower.whole_layers == own.tower.whole_layers
        assert form.tower.window == own.tower.window
        np.testing.assert_allclose(form.tower.bounds, own.tower.bounds)
        assert form.tower.encoder.layers == own.tower.encoder.layers
        for part in tower_layout(TowerPart.whole(form.tower)).matrices:
            found, expected = (source(each).matrix(part)["weight"] for each in (form, own))
            np.testing.assert_array_equal(found, expected, part.name)
        parts = {part.name: part for part in tower_layout(TowerPart.whole(own.tower)).vectors}
        for vector in tower_layout(TowerPart.whole(form.tower)).vectors:
            found = source(form).vector(vector)
            expected = source(own).vector(parts[vector.name])
            if vector.name == "merger.row_norm" and folder.name == "gemma3":
                expected = expected + np.float32(1)
            if vector.name == "patches" and own.tower.channels_last:
                side = own.tower.patch_size
                expected = expected.reshape(-1, side, side, 3).transpose(0, 3, 1, 2).reshape(-1)
            if vector.name == "patches" and form.tower.frames_apart:
                hidden = form.tower.encoder.hidden_size
                frames = expected.reshape(hidden, 3, 2, -1).transpose(2, 0, 1, 3)
                expected = frames.reshape(-1)
            np.testing.assert_array_equal(found, expected, vector.name)
        form.store.close()


def test_a_file_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_mmproj(folder, folder.name, tmp_path / "mmproj-F32.gguf")
    with Checkpoint.open(folder) as checkpoint:
        other = replace(checkpoint.spec, hidden_size=2 * checkpoint.spec.hidden_size)
    with pytest.raises(CheckpointError, match="another model"):
        tower_beside(tmp_path / "model.gguf", other)


def test_sizes_in_the_file_are_checked(folder: Path, tmp_path: Path) -> None:
    write_mmproj(folder, folder.name, tmp_path / "mmproj-F32.gguf", feed_forward_length=71)
    with Checkpoint.open(folder) as checkpoint:
        form = tower_beside(tmp_path / "model.gguf", checkpoint.spec)
    assert form is not None
    with pytest.raises(CheckpointError, match="ffn"):
        check_tower(form, tmp_path)
    form.store.close()


def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        spec = checkpoint.spec
    assert tower_beside(tmp_path / "model.gguf", spec) is None
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match="mmproj-F16"):
        tower_beside(tmp_path / "model.gguf", spec)


def test_a_folder_with_both_files_is_a_model_that_reads_pictures(tmp_path: Path) -> None:
    make_tower_model(tmp_path / "smolvlm", "smolvlm")
    make_checkpoint(tmp_path / "text", "llama")
    folder = tmp_path / "both"
    folder.mkdir()
    write_gguf(folder / "model.gguf", tmp_path / "text")
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.tower is None
    write_mmproj(tmp_path / "smolvlm", "smolvlm", folder / "mmproj-F32.gguf")
    for path in (folder, folder / "model.gguf"):
        with Checkpoint.open(path) as checkpoint:
            tower = checkpoint.tower
            assert tower is not None
            assert checkpoint.tower_fingerprint != checkpoint.store.fingerprint
            chosen = tower_format(tower, weight_format(checkpoint.spec, "float32"))
            weights = checkpoint.tower_source(
                chosen, cache_root=tmp_path, on_progress=lambda _: None
            )
            for part in tower_layout(TowerPart.whole(tower)).vectors:
                assert np.isfinite(weights.vector(part)).all()
