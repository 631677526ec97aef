"""Towers as data: what fits together, JSON, and the rows of tiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge.backends.null.tower import NullTower
from edge.errors import CheckpointError
from edge.kernels.position_table.reference import TABLES, taps
from edge.models.attention import Attention
from edge.models.families import read_family
from edge.models.pictures import Tile
from edge.models.towers.families import TOWERS, read_tower
from edge.models.towers.part import TowerPart
from edge.models.towers.positions import block_order, turn_tables, windows
from edge.models.towers.tower import Projection, Tower, TowerNorm
from edge.weights.tower import tower_layout

_TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "depth": 3,
    "num_attention_heads": 3,
    "num_heads": 3,
    "image_size": 48,
    "patch_size": 4,
    "head_dim": 8,
    "num_key_value_heads": 3,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "window_size": 16,
}


def made(model_type: str, processor: dict[str, Any] | None = None, **changes: Any) -> Tower:
    config = {"model_type": model_type, "vision_config": _VISION, "mm_tokens_per_image": 16}
    config |= {"text_config": _TEXT} | changes
    _family, model = read_family(_TEXT, source="text")
    found = read_tower(config, processor or {}, model, source="config.json")
    assert found is not None
    return found[1]


@pytest.mark.parametrize("model_type", TOWERS)
def test_json_gives_the_same_tower(model_type: str) -> None:
    tower = made(model_type)
    found = Tower.from_json(json.loads(json.dumps(tower.to_json())))
    assert found == tower
    assert found.digest == tower.digest
    assert replace(tower, max_patches=tower.side**2, grid=None).digest != tower.digest


@pytest.mark.parametrize("model_type", TOWERS)
def test_the_layout_has_every_weight_once(model_type: str) -> None:
    tower = made(model_type)
    layout = tower_layout(TowerPart.whole(tower))
    counted = sum(each.num_rows * len(each.columns) for each in layout.matrices)
    counted += sum(each.num_elements for each in layout.vectors)
    assert counted == sum(np.prod(shape) for shape in tower.shapes().values())
    assert not layout.embedding


@pytest.mark.parametrize("model_type", TOWERS)
def test_parts_have_every_weight_once(model_type: str) -> None:
    tower = replace(made(model_type), deep=())
    whole = tower_layout(TowerPart.whole(tower))
    parts = [TowerPart(tower=tower, layers=layers) for layers in (range(2), range(2, 3))]
    for part in parts:
        assert TowerPart.from_json(json.loads(json.dumps(part.to_json()))) == part
    found = [tower_layout(part) for part in parts]
    for kind in ("matrices", "vectors"):
        names = [each.name for layout in found for each in getattr(layout, kind)]
        assert sorted(names) == sorted(each.name for each in getattr(whole, kind))


def test_a_part_has_layers_of_its_tower() -> None:
    tower = made("smolvlm")
    for layers in (range(0), range(2, 4), range(-1, 2), range(0, 3, 2)):
        with pytest.raises(ValueError, match="layers"):
            TowerPart(tower=tower, layers=layers)
    for told in ([0], "ab", [0, 1.5], [True, 2]):
        with pytest.raises(ValueError, match="layers"):
            TowerPart.from_json({"tower": tower.to_json(), "layers": told})
    with pytest.raises(ValueError, match="deep"):
        TowerPart(tower=made("qwen3_vl"), layers=range(1))


def _with(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for each in parents:
            told = told[each]
        told[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _with("max_patches", 1 << 17),
        _with("max_patches", 1.5),
        _with("side", 0),
        _with("side", 1 << 20),
        _with("frames", 1 << 20),
        _with("patch_size", 1 << 20),
        _with("table", "other"),
        _with("table_side", 1 << 22),
        _with("pixel_scale", [1.0, 2.0]),
        _with("pixel_shift", [1.0, 2.0, float("nan")]),
        _with("turns.rows", [1.0]),
        _with("turns.rows", "abcd"),
        _with("deep", [[0]]),
        _with("deep", [[7, None]]),
        _with("deep", 5),
        _with("merger", None),
        _with("merger.joining", "sum"),
        _with("merger.projections", []),
        _with("merger.projections", [None] * 1000),
        _with("merger.patch_norm.kind", "batch"),
        _with("bounds", [[1.0]]),
        _with("bounds", [[1.0] * 28] * 3),
        _with("window", 0),
        _with("window", 1 << 20),
        _with("whole_layers", [3]),
        _with("whole_layers", 1),
        _with("grid", [2, 2]),
        _with("grid", 7),
        _with("encoder", {}),
        _with("output_size", 33),
        _with("more", 1),
    ],
)
def test_impossible_json_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    told = json.loads(json.dumps(made("qwen3_vl").to_json()))
    change(told)
    with pytest.raises(ValueError, match=r"\w \w"):  # a sentence
        Tower.from_json(told)


def test_layers_with_other_attention_are_refused() -> None:
    tower = made("mistral3")
    (kind,) = tower.encoder.kinds
    assert isinstance(kind.mixer, Attention)
    for changes in ({"window": 5}, {"num_kv_heads": 1}, {"has_sinks": True}):
        changed: Any = changes
        other = replace(kind, mixer=replace(kind.mixer, **changed))
        with pytest.raises(ValueError, match="plain attention"):
            replace(tower, encoder=replace(tower.encoder, kinds=(other,)))


def test_rows_of_tiles() -> None:
    tower = made("mistral3")
    assert tower.row_grid(4, 6) == (2, 3)
    assert tower.rows(4, 6) == 6
    for size in ((4, 5), (0, 4), (-2, -2), (12, 14)):
        with pytest.raises(ValueError, match="patches"):
            tower.rows(*size)
    with pytest.raises(ValueError, match="only"):
        made("gemma3").rows(6, 6)
    with pytest.raises(ValueError, match="table"):
        replace(made("idefics3"), max_patches=1000).rows(2, 14)


def test_patches_of_another_size_are_refused() -> None:
    tower = made("mistral3")
    tower.check(Tile(patches=np.zeros((4, 48), np.uint8), height=2, width=2))
    with pytest.raises(ValueError, match="values"):
        tower.check(Tile(patches=np.zeros((4, 75), np.uint8), height=2, width=2))


def test_operations_grow_with_patches_and_their_square() -> None:
    tower = made("mistral3")
    small, large = tower.operations(2, 2), tower.operations(4, 4)
    attention = 2 * 4**2 * 24 * 3
    assert large - 4 * small == (16 - 4) * attention
    # Of a patch: its matrix and the layers. Of a row: three projections.
    layer = 24 * 24 * 4 + 24 * 40 * 3
    assert small - attention == 4 * (24 * 48 + 3 * layer) + 24 * 4 * 24 + 24 * 32 + 32 * 32


def test_pixels_by_the_processor() -> None:
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 1, 2], "rescale_factor": 0.01}
    tower = made("smolvlm", settings)
    np.testing.assert_allclose(tower.pixel_scale, [0.02, 0.01, 0.005])
    np.testing.assert_allclose(tower.pixel_shift, [-0.2, -0.2, -0.15])
    plain = made("smolvlm", {"do_normalize": False, "do_rescale": False})
    assert (plain.pixel_scale, plain.pixel_shift) == ((1.0,) * 3, (0.0,) * 3)
    np.testing.assert_allclose(made("gemma4").pixel_scale, [2 / 255] * 3)
    for name, value in (("image_std", [1, 0, 1]), ("image_mean", [1]), ("rescale_factor", "x")):
        with pytest.raises(CheckpointError, match=name):
            made("smolvlm", {name: value})


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma3", {"mm_tokens_per_image": 25}),
        ("mistral3", {"vision_feature_layer": -2}),
        ("qwen3_vl", {"vision_config": {**_VISION, "deepstack_visual_indexes": [9]}}),
        ("qwen3_vl", {"vision_config": {**_VISION, "rope_parameters": {"rope_type": "yarn"}}}),
        ("gemma4", {"vision_config": {**_VISION, "num_key_value_heads": 1}}),
        ("smolvlm", {"vision_config": {**_VISION, "hidden_act": "relu"}}),
        ("smolvlm", {"vision_config": {**_VISION, "num_attention_heads": 7}}),
        ("smolvlm", {"vision_config": {**_VISION, "patch_size": 100}}),
    ],
)
def test_towers_that_are_not_computed_are_refused(model_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        made(model_type, **changes)


def test_text_models_have_no_tower() -> None:
    _family, model = read_family(_TEXT, source="text")
    assert read_tower(_TEXT, {}, model, source="text") is None


def test_blocks_of_patches_stand_together() -> None:
    assert block_order(2, 2, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert sorted(block_order(3, 6, 9)) == list(range(54))


def test_windows_of_blocks() -> None:
    order = block_order(2, 4, 6)  # 2 by 3 blocks
    members, counts, back = windows(2, 2, 4, 6)
    assert counts.tolist() == [16, 8]
    own = [set(order[some[:count]]) for some, count in zip(members, counts, strict=True)]
    assert own[0] == {6 * y + x for y in range(4) for x in range(4)}
    assert own[1] == {6 * y + x for y in range(4) for x in (4, 5)}
    assert members.reshape(-1)[back].tolist() == list(range(24))


def test_windows_make_fewer_operations() -> None:
    tower = made("qwen2_5_vl")
    assert (tower.window, tower.whole_layers) == (2, (1,))
    every = replace(tower, window=None)
    two_layers = 2 * 2 * (64 - 16) * 64 * 24
    assert every.operations(8, 8) - tower.operations(8, 8) == two_layers


def test_older_files_have_the_text_outside() -> None:
    rope = {"type": "mrope", "mrope_section": [1, 2, 1]}
    outside = {**_TEXT, "rope_scaling": rope, "vision_config": _VISION}
    _family, model = read_family({**outside, "model_type": "qwen2_5_vl"}, source="config.json")
    assert (model.family, model.hidden_size) == ("qwen2", 32)
    found = read_tower({**outside, "model_type": "qwen2_5_vl"}, {}, model, source="config.json")
    assert found is not None


def test_turns_by_row_and_column() -> None:
    turns = made("mistral3").turns
    assert turns is not None
    cos, sin = turn_tables(turns, 2, 3)
    assert cos.shape == (6, 4)
    np.testing.assert_array_equal(sin[:3, :2], 0)  # the first row
    np.testing.assert_array_equal(sin[::3, 2:], 0)  # the first column
    np.testing.assert_allclose(cos[3, :2], np.cos(turns.rows), rtol=1e-6)


@pytest.mark.parametrize("table", TABLES)
def test_shares_of_a_table_sum_up(table: Any) -> None:
    places, shares = taps(table, 7, 5, 3)
    assert places.shape == shares.shape
    assert places.min() >= 0
    assert places.max() < (14 if table == "axes" else 49)
    np.testing.assert_allclose(shares.sum(axis=0), 2 if table == "axes" else 1, rtol=1e-6)


def test_norms_and_projections_are_checked() -> None:
    with pytest.raises(ValueError, match="epsilon"):
        TowerNorm(kind="rms", epsilon=2.0)
    with pytest.raises(ValueError, match="activation"):
        Projection(outputs=4, bias=False, activation="relu")  # type: ignore[arg-type]


def test_a_stand_in_gives_the_same_rows_for_the_same_tile() -> None:
    tower = made("qwen3_vl")
    program = NullTower(TowerPart.whole(tower), weight_bytes=5)
    tiles = [
        Tile(patches=np.full((8, 48), fill, np.uint8), height=2, width=4) for fill in (1, 1, 2)
    ]
    one, same, other = map(program.read, tiles)
    assert one.shape == (2, tower.row_size)
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    with pytest.raises(ValueError, match="blocks"):
        program.read(Tile(patches=np.zeros((3, 48), np.uint8), height=1, width=3))
    plain = made("mistral3")
    rows = NullTower(TowerPart.whole(plain), weight_bytes=5).read(tiles[0])
    assert rows.shape == (2, 32)
    first, last = (
        NullTower(TowerPart(tower=plain, layers=layers), weight_bytes=5)
        for layers in (range(1), range(1, 3))
    )
    np.testing.assert_array_equal(last.go_on(first.read(tiles[0]), 2, 4), rows)
