"""Quantised folders: their weights as floats and as codes are the ones that were packed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edge.errors import CheckpointError
from edge.models.parts import MatrixSlice
from edge.models.spec import tensor_shapes
from edge.weights.block_matrices import Blocks
from edge.weights.checkpoint import Checkpoint
from edge.weights.encoding import Encoding
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import Floats
from edge.weights.format_sizes import in_words
from edge.weights.formats import weight_format
from edge.weights.layout import whole_layout
from edge.weights.packed.folder import PackedStore
from edge.weights.packed.matrix import rows_of
from tests.support.checkpoints import TinyCheckpoint, make_checkpoint
from tests.support.packed_folders import (
    Layout,
    auto_round,
    awq,
    compressed,
    fp8,
    gptq,
    gptq_by_rules,
    mlx,
    nvfp4,
    write_mxfp4,
    write_packed,
)

EXACT: dict[str, Layout] = {
    "gptq": gptq(),
    "gptq of 16": gptq(group=16),
    "gptq of 128": gptq(group=128),
    "gptq of rows": gptq(group=-1),
    "gptq of 96": gptq(group=96),
    "gptq with zeros": gptq(symmetric=False),
    "gptq of 8 bits": gptq(bits=8, symmetric=False, group=64),
    "gptq of 2 bits": gptq(bits=2, symmetric=False),
    "gptq_v2": gptq(version=2, symmetric=False),
    "gptq without g_idx": gptq(has_order=False),
    "gptq by rules": gptq_by_rules(),
    "auto-round as gptq": auto_round(gptq(), "auto_round:auto_gptq"),
    "auto-round as gptq by rules": auto_round(
        gptq_by_rules(rules="extra_config"), "auto_round:auto_gptq"
    ),
    "auto-round as awq": auto_round(awq(), "auto_round:auto_awq"),
    "awq": awq(),
    "awq of 64": awq(64),
    "awq of 128": awq(128),
    "compressed": compressed(),
    "compressed of 64": compressed(group=64, symmetric=False),
    "compressed of 128": compressed(group=128),
    "compressed with packed zeros": compressed(symmetric=False),
    "compressed with zeros": compressed(symmetric=False, packed_zeros=False),
    "compressed of 8 bits": compressed(8, None),
    "compressed of 2 bits": compressed(2, 32, symmetric=False),
    "compressed int8": compressed(8, None, plain=True),
    "mlx": mlx(),
    "mlx of 8 bits": mlx(8, 64),
    "mlx of 2 bits": mlx(2, 64),
    "nvfp4": nvfp4(),
    "nvfp4 of modelopt": nvfp4("modelopt"),
}
SORTED: dict[str, Layout] = {
    "gptq in act-order": gptq(act_order=True, symmetric=False),
    "gptq in act-order without zeros": gptq(act_order=True, group=16),
    "gptq in act-order of groups of 48": gptq(act_order=True, group=48),
    "gptq_v2 in act-order": gptq(act_order=True, version=2, symmetric=False),
    "gptq of 8 bits in act-order": gptq(act_order=True, bits=8, of_its_own=True),
    "compressed in act-order": compressed(act_order=True),
    "compressed in act-order with packed zeros": compressed(act_order=True, symmetric=False),
    "compressed in act-order with zeros": compressed(
        act_order=True, symmetric=False, packed_zeros=False
    ),
}
AS_FLOATS: dict[str, Layout] = {
    "fp8 in blocks": fp8(),
    "fp8 of rows": fp8("rows"),
    "fp8 of a tensor": fp8("tensor"),
}
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")

Write = Callable[[Layout], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / "made", "qwen2_in_blocks").path


@pytest.fixture
def written(made: Path, tmp_path: Path) -> Write:
    def write(layout: Layout) -> tuple[Path, dict[str, Any]]:
        meant = write_packed(tmp_path / "packed", made, layout)
        return tmp_path / "packed", load_file(meant.path / "model.safetensors")

    return write


@pytest.mark.parametrize("name", [*EXACT, *SORTED, *AS_FLOATS])
def test_floats_are_those_that_were_packed(name: str, written: Write) -> None:
    """To the last bit, whole and in slices; also of rows that are a matrix of their own."""
    folder, meant = written({**EXACT, **SORTED, **AS_FLOATS}[name])
    with Checkpoint.open(folder) as opened:
        store = opened.store
        assert isinstance(store, PackedStore)
        read = {
            each for each in store.names() if not each.endswith(("input_scale", "global_scale"))
        }
        assert read == set(meant)
        for tensor, expected in meant.items():
            assert store.shape(tensor) == expected.shape
            np.testing.assert_array_equal(store.read(tensor).astype(np.float32), expected)
        for layer in NAMES:
            tensor = f"model.layers.1.{layer}.weight"
            part = store.read(tensor, rows=range(5, 19), columns=range(13, 62))
            np.testing.assert_array_equal(part, meant[tensor][5:19, 13:62])
            few = rows_of(rows_of(store.packed[tensor], range(2, 40)), range(1, 30))
            assert few.shape == (29, meant[tensor].shape[1])
            part = few.floats(range(2, 16), range(13, 62))
            np.testing.assert_array_equal(part, meant[tensor][5:19, 13:62])


@pytest.mark.parametrize("name", EXACT)
def test_codes_stand_for_the_same_weights(name: str, written: Write, tmp_path: Path) -> None:
    """Cut anywhere."""
    folder, meant = written(EXACT[name])
    with Checkpoint.open(folder) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        assert chosen.name == "as stored"
        source = opened.source(chosen, cache_root=tmp_path, on_progress=lambda progress: None)
        grade = chosen.graded(opened.spec).layer(2).grade
        for role in (f"layers.2.{each}.weight" for each in ("query", "output", "up", "down")):
            whole = meant[opened.tensor_name(role)]
            height, width = whole.shape
            for rows, columns in (
                (range(height), range(width)),
                (range(3, height - 7), range(width)),
                (range(height), range(16, width - 5)),
                (range(9, 10), range(24, 60)),
            ):
                matrix = MatrixSlice(name="x", parts=((role, rows),), columns=columns, grade=grade)
                (stored,) = chosen.recipe.stored(matrix)
                arrays = source.matrix(matrix)
                assert {array.suffix: array.shape for array in stored.arrays} == {
                    suffix: array.shape for suffix, array in arrays.items()
                }
                floats = stored.kind.floats(arrays.__getitem__, stored.columns)
                expected = whole[rows.start : rows.stop, columns.start : columns.stop]
                tolerance = 1e-6 if "mlx" in name else 0  # the offset takes in half of the range
                np.testing.assert_allclose(
                    floats[:, stored.padding :], expected, rtol=0, atol=tolerance
                )
        source.close()


@pytest.mark.parametrize("name", SORTED)
def test_codes_in_act_order_stand_for_the_same_weights(
    name: str, written: Write, tmp_path: Path
) -> None:
    """Whole, and some of their rows. What devices share by columns is rounded to 8 bits."""
    folder, meant = written(SORTED[name])
    with Checkpoint.open(folder) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        assert chosen.name == "as stored"
        source = opened.source(chosen, cache_root=tmp_path, on_progress=lambda progress: None)
        layout = whole_layout(chosen.graded(opened.spec))
        for matrix in (each for each in layout.matrices if each.name.startswith("layers.2.")):
            stored = chosen.recipe.stored(matrix)
            fused = matrix.name.endswith(("qkv", "gate_up"))
            assert (len(stored) > 1) == (fused and "8 bits" in name)
            for each in stored:
                whole = np.concatenate(
                    [meant[opened.tensor_name(role)][rows] for role, rows in each.part.parts]
                )
                arrays = source.matrix(each.part)
                assert {array.suffix: array.shape for array in each.arrays} == {
                    suffix: array.shape for suffix, array in arrays.items()
                }
                found = each.kind.floats(arrays.__getitem__, each.columns)
                if fused:
                    assert isinstance(each.kind, Blocks)
                    assert each.kind.is_sorted
                    np.testing.assert_array_equal(found, whole)
                else:
                    assert isinstance(each.kind, Blocks)
                    assert each.kind.bits == 8
                    assert np.linalg.norm(found - whole) <= 0.01 * np.linalg.norm(whole)
        source.close()


def test_groups_of_unlike_sizes_are_rounded(written: Write) -> None:
    """No block holds such a group."""
    folder, _meant = written(gptq(act_order=True))
    damage = changed(f"{LAYER}.g_idx", lambda order: np.where(order == 1, 0, order))
    damage(folder)
    with Checkpoint.open(folder) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        assert chosen.name == "int4"
        assert "whose groups are in act-order" in in_words(opened.spec, chosen)


@pytest.mark.parametrize(
    ("layout", "dtype", "words"),
    [
        (gptq(), "as stored", "the head, which is in floats there, in 8 bits"),
        (
            gptq(act_order=True),
            "as stored",
            "matrices in act-order that devices divide by columns, in 8 bits",
        ),
        (fp8(), "int8", "floats of 8 bits"),
        (mlx(), "as stored", "as stored: 4 bits in blocks of 32 with offsets, 6 bits a weight"),
    ],
)
def test_what_it_becomes_is_told(layout: Layout, dtype: str, words: str, written: Write) -> None:
    with Checkpoint.open(written(layout)[0]) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        assert chosen.name == dtype
        assert words in in_words(opened.spec, chosen)
        assert "there" not in in_words(opened.spec, weight_format(opened.spec, "int8"))


def test_layers_that_stay_floats_are_floats(made: Path, tmp_path: Path) -> None:
    kept = "model.layers.1.mlp.down_proj"
    write_packed(tmp_path / "packed", made, awq(), keep=lambda layer: layer == kept)
    with Checkpoint.open(tmp_path / "packed") as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        assert chosen.grades == (0, 1, 0, 0)
        assert chosen.recipe.kind("layers.1.down.weight", 1) == Floats()
        assert chosen.recipe.kind("layers.0.down.weight", 0) == Blocks(4, 32, zero_points=True)
        assert chosen.recipe.kind("head", 0) == Blocks(8, 64)


def test_the_fingerprint_changes_with_how_tensors_are_read(written: Write) -> None:
    folder, _meant = written(gptq(symmetric=False))
    with Checkpoint.open(folder) as opened:
        before = opened.store.fingerprint
    change(folder, checkpoint_format="gptq_v2")
    with Checkpoint.open(folder) as opened:
        assert opened.store.fingerprint != before


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return damage


def changed(name: str, become: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = become(tensors[name])
        save_file(tensors, folder / "model.safetensors")

    return damage


def says(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder, **values)


LAYER = "model.layers.1.mlp.up_proj"
WITHOUT_SCALES = dataclasses.replace(
    fp8(), pack=lambda weight: ({"weight": weight.astype(ml_dtypes.float8_e4m3fn)}, weight)
)


@pytest.mark.parametrize(
    ("layout", "damage", "sentence"),
    [
        (gptq(), says(bits=3), "codes of 3 bits are not read"),
        (gptq(), says(group_size=64), "layers.0.mlp.down_proj.scales"),
        (gptq(), says(group_size=24), "for 24 columns; with 4 bits multiples of 16 are read"),
        (gptq(bits=2), says(group_size=16), "for 16 columns; with 2 bits multiples of 32 are read"),
        (gptq(), says(group_size="all"), "group_size must be an integer"),
        (gptq(), says(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not read"),
        (gptq(), without(f"{LAYER}.scales"), f"{LAYER}.qweight"),
        (gptq(), without(f"{LAYER}.qzeros"), f"has no {LAYER}.qzeros beside it"),
        (gptq(), without(f"{LAYER}.qweight"), f"tensor {LAYER}.weight is missing"),
        (gptq(), changed(f"{LAYER}.qweight", lambda a: a[:-1]), "make it"),
        (gptq(), changed(f"{LAYER}.qweight", lambda a: a[0]), "which is no matrix of codes"),
        (gptq(), changed(f"{LAYER}.scales", lambda a: a.astype(np.int32)), "is int32, where"),
        (gptq(), changed(f"{LAYER}.g_idx", lambda a: a + 1), "names groups beyond"),
        (awq(), says(version="gemv"), "AWQ of version 'gemv' is not read"),
        (awq(), says(bits=8), "AWQ of 8 bits is not read"),
        (awq(), changed(f"{LAYER}.scales", lambda a: a.T.copy()), "has shape [96, 2]"),
        (compressed(), says(format="marlin-24"), "format 'marlin-24' is not read"),
        (compressed(), says(config_groups={}), "config_groups must be 1 to"),
        (compressed(), says(config_groups={"a": {"weights": {"num_bits": 3}}}), "codes of 3 bits"),
        (compressed(), without(f"{LAYER}.weight_scale"), f"has no {LAYER}.weight_scale beside"),
        (compressed(), changed(f"{LAYER}.weight_shape", lambda a: a + 32), "number of rows"),
        (fp8(), says(weight_block_size=[64, 64]), "make it"),
        (fp8(), says(weight_block_size=7), "weight_block_size must be two sizes"),
        (WITHOUT_SCALES, says(), "is of 8 bits and has no model.layers.0.mlp"),
        (mlx(), says(bits=6), "codes of 6 bits"),
        (mlx(), says(mode="mxfp4"), "mode 'mxfp4'"),
        (mlx(), without(f"{LAYER}.biases"), f"has no {LAYER}.biases beside it"),
        (gptq(), says(quant_method="bitsandbytes"), "'bitsandbytes', which is not read (bitsand"),
        (gptq(), says(quant_method="hqq"), "'hqq', which is not read (the layout of HQQ"),
        (gptq(), says(quant_method=["gptq"]), "which is not read"),
    ],
)
def test_what_is_not_read_is_a_sentence(
    layout: Layout, damage: Callable[[Path], None], sentence: str, written: Write
) -> None:
    folder, _meant = written(layout)
    damage(folder)
    with pytest.raises(CheckpointError, match=re.escape(sentence)) as told:
        Checkpoint.open(folder).close()
    assert str(folder) in str(told.value)


@pytest.mark.parametrize(
    ("layout", "file", "names"),
    [
        (gptq(symmetric=False), "quantize_config.json", {}),
        (awq(64), "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
    ],
)
def test_settings_in_a_file_of_their_own(
    layout: Layout, file: str, names: dict[str, str], written: Write
) -> None:
    folder, meant = written(layout)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    old = {names.get(name, name): value for name, value in settings.items()}
    (folder / file).write_text(json.dumps(old))
    with Checkpoint.open(folder) as opened:
        for tensor, expected in meant.items():
            np.testing.assert_array_equal(opened.store.read(tensor), expected)
    (folder / file).write_text("[")
    with pytest.raises(CheckpointError, match=re.escape(file)):
        Checkpoint.open(folder)


def test_settings_that_were_left_in_a_folder_of_floats(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "floats"))
    for left in ("{}", '{"bits": 3}', "["):
        (folder / "quantize_config.json").write_text(left)
        with Checkpoint.open(folder) as opened:
            assert opened.own_encoding is None


def test_codes_without_a_configuration(written: Write) -> None:
    folder, _meant = written(gptq())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="there is no quantization_config"):
        Checkpoint.open(folder)


def test_zero_points_of_a_folder_that_says_it_has_none(written: Write, tmp_path: Path) -> None:
    folder, _meant = written(gptq(symmetric=False))
    change(folder, sym=True)
    with Checkpoint.open(folder) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        source = opened.source(chosen, cache_root=tmp_path, on_progress=lambda progress: None)
        part = MatrixSlice(name="x", parts=(("layers.0.up.weight", range(8)),), columns=range(64))
        with pytest.raises(CheckpointError, match="set sym to false"):
            source.matrix(part)
        source.close()


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    values = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(values))


def renamed(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)

    return damage


def beside_gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (adapter, "is a LoRA adapter of 'some/base'"),
        (renamed("consolidated.safetensors"), "whose tensors have their makers' own names"),
        (renamed("gptq-4bit.safetensors"), "name it model.safetensors"),
        (renamed("pytorch_model.bin"), "its pytorch_model.bin is a pickle, which is never read"),
        (renamed("model.pt"), "its model.pt is a pickle"),
        (renamed("training_args.bin"), "has neither model.safetensors nor"),
        (beside_gguf, "holds model.gguf; give the path of that file"),
    ],
)
def test_folders_of_another_form(
    damage: Callable[[Path], None], sentence: str, written: Write
) -> None:
    folder, _meant = written(gptq())
    damage(folder)
    with pytest.raises(CheckpointError, match=re.escape(sentence)) as told:
        Checkpoint.open(folder)
    assert str(folder) in str(told.value)


def change(folder: Path, **values: Any) -> None:
    """In what config.json says of the quantisation."""
    config = json.loads((folder / "config.json").read_text())
    key = "quantization" if "quantization" in config else "quantization_config"
    config[key] |= values
    (folder / "config.json").write_text(json.dumps(config))


BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"


@pytest.fixture
def mxfp4(tmp_path: Path) -> tuple[Path, TinyCheckpoint]:
    made = make_checkpoint(tmp_path / "made", "gpt_oss_in_blocks")
    return tmp_path / "packed", write_mxfp4(tmp_path / "packed", made.path, lambda head: head)


@pytest.mark.parametrize("packed", [False, True], ids=["blocks", "packed"])
def test_floats_of_4_bits_are_those_that_were_packed(
    mxfp4: tuple[Path, TinyCheckpoint], tmp_path: Path, packed: bool
) -> None:
    """To the last bit, as floats and as codes, whole and in slices."""
    folder, meant = mxfp4
    kind = Blocks(8, 32) if packed else FileBlocks("MXFP4")
    with Checkpoint.open(folder) as opened, Checkpoint.open(meant.path) as plain:
        own = opened.own_encoding
        assert isinstance(own, Encoding)
        chosen = weight_format(opened.spec, "auto", own=own.packed if packed else own)
        assert chosen.name == "as stored"
        assert chosen.recipe.kind("layers.1.experts.2.up.weight", 0) == kind
        assert chosen.recipe.kind("layers.1.router.weight", 0) == Floats()
        source = opened.source(chosen, cache_root=tmp_path, on_progress=lambda progress: None)
        for role in tensor_shapes(opened.spec):
            name = opened.tensor_name(role)
            expected = plain.store.read(name)
            np.testing.assert_array_equal(opened.store.read(name), expected)
            if role.startswith("layers.1.experts.2.") and role.endswith("weight"):
                rows, columns = range(5, 19), range(32, expected.shape[1] - 5)
                part = expected[rows.start : rows.stop, columns.start : columns.stop]
                np.testing.assert_array_equal(opened.store.read(name, rows, columns), part)
                matrix = MatrixSlice(name="x", parts=((role, rows),), columns=columns)
                (stored,) = chosen.recipe.stored(matrix)
                found = stored.kind.floats(source.matrix(matrix).__getitem__, stored.columns)
                np.testing.assert_array_equal(found[: len(rows)], part)
        source.close()


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_floats_with_scales_of_8_bits_are_those_that_were_packed(
    tmp_path: Path, method: str
) -> None:
    """As blocks, to the last bit, whole and in slices."""
    made = make_checkpoint(tmp_path / "made", "llama_in_blocks")
    folder = tmp_path / "packed"
    meant = load_file(write_packed(folder, made.path, nvfp4(method)).path / "model.safetensors")
    with Checkpoint.open(folder) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        source = opened.source(chosen, cache_root=tmp_path, on_progress=lambda progress: None)
        for role in ("layers.1.query.weight", "layers.1.down.weight"):
            assert chosen.recipe.kind(role, 0) == FileBlocks("NVFP4")
            whole = meant[opened.tensor_name(role)]
            for rows, columns in (
                (range(len(whole)), range(whole.shape[1])),
                (range(5, 19), range(whole.shape[1] - 256, whole.shape[1])),
            ):
                matrix = MatrixSlice(name="x", parts=((role, rows),), columns=columns)
                (stored,) = chosen.recipe.stored(matrix)
                found = stored.kind.floats(source.matrix(matrix).__getitem__, stored.columns)
                expected = whole[rows.start : rows.stop, columns.start : columns.stop]
                np.testing.assert_array_equal(found[: len(rows)], expected)
        source.close()


Damage = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda own: own["weight_scale"].fill(np.nan), "has scales that are no numbers"),
        (lambda own: own["weight_global_scale"].fill(0), "holds NaN or infinite weights"),
        (lambda own: own.pop("weight_scale"), "has no .*weight_scale beside it"),
        (lambda own: own.pop("weight_global_scale"), "has no .*weight_global_scale beside it"),
        (lambda own: own.update(weight_packed=own["weight_packed"][:, :7]), "14 columns, which"),
        (lambda own: own.update(weight_scale=own["weight_scale"][1:]), "has shape"),
    ],
)
def test_damaged_floats_with_scales_of_8_bits_are_refused(
    tmp_path: Path, damage: Damage, sentence: str
) -> None:
    sound = nvfp4()

    def pack(weight: Any) -> Any:
        tensors, meant = sound.pack(weight)
        damage(tensors)
        return tensors, meant

    made = make_checkpoint(tmp_path / "made", "llama_in_blocks")
    folder = tmp_path / "packed"
    write_packed(folder, made.path, dataclasses.replace(sound, pack=pack))
    with pytest.raises(CheckpointError, match=sentence):
        read_some_blocks(folder, tmp_path)


def read_some_blocks(folder: Path, cache: Path) -> None:
    with Checkpoint.open(folder) as opened:
        chosen = weight_format(opened.spec, "auto", own=opened.own_encoding)
        source = opened.source(chosen, cache_root=cache, on_progress=lambda progress: None)
        part = ("layers.1.up.weight", range(32))
        with contextlib.closing(source):
            source.matrix(MatrixSlice(name="x", parts=(part,), columns=range(256)))


def test_another_algorithm_of_modelopt_is_refused(written: Write) -> None:
    folder, _meant = written(nvfp4("modelopt"))
    change(folder, quant_algo="W4A8_AWQ")
    with pytest.raises(CheckpointError, match="quant_algo 'W4A8_AWQ' is not read, NVFP4 is"):
        Checkpoint.open(folder)


def forget_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without(BLOCKS.replace("blocks", "scales")), f"{BLOCKS} in .* has no .*_scales beside it"),
        (changed(BLOCKS, lambda a: a[..., :8]), f"{BLOCKS} .* which is no experts' blocks"),
        (changed(BLOCKS, lambda a: a[:, :5]), f"{BLOCKS} .* which is no experts' blocks"),
        (changed(BLOCKS, lambda a: a.astype(np.int16)), f"{BLOCKS} .* is int16, where uint8"),
        (changed(BLOCKS, lambda a: a[:2]), "_scales .* has shape"),
        (forget_config, "there is no quantization_config"),
    ],
)
def test_damaged_floats_of_4_bits_are_refused_by_their_name(
    mxfp4: tuple[Path, TinyCheckpoint], damage: Callable[[Path], None], sentence: str
) -> None:
    folder, _meant = mxfp4
    damage(folder)
    with pytest.raises(CheckpointError, match=sentence):
        Checkpoint.open(folder).close()


@pytest.mark.parametrize(
    ("name", "layout", "what"),
    [
        ("lfm2_in_blocks", mlx(), "mlx"),
        ("qwen3_next_in_blocks", gptq(), r"model\.layers\.0\.linear_attn\.in_proj_qkvz\.weight"),
    ],
)
def test_models_with_states_that_would_be_read_otherwise(
    tmp_path: Path, name: str, layout: Layout, what: str
) -> None:
    made = make_checkpoint(tmp_path / "made", name, layers=2)
    write_packed(tmp_path / "model", made.path, layout)
    with pytest.raises(CheckpointError, match=rf"quantised like this \({what}\) is not computed"):
        Checkpoint.open(tmp_path / "model")
