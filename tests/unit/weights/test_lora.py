"""A model with a LoRA adapter has the weights that peft makes of it; other adapters are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edge.errors import CheckpointError, RequestError
from edge.models.families import read_family
from edge.models.spec import tensor_shapes
from edge.weights.checkpoint import Checkpoint
from tests.support.checkpoints import StoredType, TinyCheckpoint, make_checkpoint
from tests.support.gguf_files import Type, write_gguf
from tests.support.lora_adapters import RANK, Adapter, Weights, write_adapters
from tests.support.packed_folders import awq, write_packed

Make = Callable[..., TinyCheckpoint]

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "every matrix": ("llama", {}),
    "some, with biases beside": ("qwen2", {"target_modules": ["q_proj", "v_proj"]}),
    "a tied head": ("qwen3", {}),
    "with the head": ("mistral", {"target_modules": ["q_proj", "lm_head"]}),
    "of stabilised rank": ("llama", {"use_rslora": True}),
    "of several ranks": (
        "llama",
        {
            "rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 2},
            "alpha_pattern": {"v_proj": 3, "layers.1.self_attn.o_proj": 11},
        },
    ),
    "with whole tensors": ("llama", {"modules_to_save": ["lm_head", "norm"]}),
}


TYPES: tuple[StoredType, ...] = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model as it lies there, the adapter, and what peft makes of the two."""

    model: Path
    meant: Path
    """The same model as a folder of floats."""
    adapter: Path
    expected: Weights


@pytest.fixture(scope="module")
def cases(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All of them, made by one process."""
    root = tmp_path_factory.mktemp("adapters")
    made = make_checkpoint(root / "made", "llama_in_blocks")
    in_gguf = write_gguf(root / "model.gguf", made.path, kind=Type.Q8_0).path
    in_awq = write_packed(root / "awq", made.path, awq()).path
    plain = tiny_checkpoint("llama").path
    models: dict[str, tuple[Path, Path, int, dict[str, Any]]] = {
        "gguf": (root / "model.gguf", in_gguf, 0, {}),
        "awq": (root / "awq", in_awq, 0, {}),
        "another": (plain, plain, 1, {}),
    }
    for case, (name, settings) in SETTINGS.items():
        path = tiny_checkpoint(name).path
        models[case] = (path, path, 0, settings)
    for stored_type in TYPES:
        path = tiny_checkpoint("llama", stored_type=stored_type).path
        models[stored_type] = (path, path, 0, {})
    wanted = [
        Adapter(folder=str(root / str(number)), model=str(meant), seed=seed, settings=settings)
        for number, (_model, meant, seed, settings) in enumerate(models.values())
    ]
    return {
        case: Case(model=model, meant=meant, adapter=Path(each.folder), expected=weights)
        for (case, (model, meant, _seed, _settings)), each, weights in zip(
            models.items(), wanted, write_adapters(wanted), strict=True
        )
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_those_of_peft(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    with Checkpoint.open(case.model) as plain, Checkpoint.open(case.model, lora=case.adapter) as it:
        changed = [
            name
            for name in plain.store.names()
            if (plain.store.read(name) != it.store.read(name)).any()
        ]
        assert changed
        assert_holds(it, case)


@pytest.mark.parametrize("stored_type", TYPES)
def test_what_is_added_is_not_rounded_to_the_models_type(
    cases: dict[str, Case], stored_type: str
) -> None:
    case = cases[stored_type]
    with Checkpoint.open(case.model, lora=case.adapter) as opened:
        assert opened.store.dtype(opened.tensor_name("layers.0.up.weight")) == np.float32
        assert opened.store.dtype(opened.tensor_name("embedding")).name == stored_type
        assert_holds(opened, case)


@pytest.mark.parametrize(("form", "nearly"), [("gguf", ("embedding",)), ("awq", ())])
def test_a_model_that_is_quantised(
    cases: dict[str, Case], form: str, nearly: tuple[str, ...]
) -> None:
    """The names of a GGUF file, and the order of its rows, are others, too."""
    case = cases[form]
    with Checkpoint.open(case.model, lora=case.adapter) as opened:
        assert opened.own_encoding is None, "its codes are not what is computed with"
        assert_holds(opened, case, nearly=nearly)


def test_each_adapter_is_another_model(cases: dict[str, Case], tmp_path: Path) -> None:
    model, first = cases["another"].model, cases["every matrix"].adapter
    for name, source in (("0", first), ("1", cases["another"].adapter)):
        shutil.copytree(source, tmp_path / name)
    config = tmp_path / "1" / "adapter_config.json"
    found = []
    for lora in (None, tmp_path / "0", tmp_path / "1", tmp_path / "1"):
        with Checkpoint.open(model, lora=lora) as opened:
            found.append(opened.store.fingerprint)
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "lora_alpha": 3}))
    with Checkpoint.open(model, lora=tmp_path / "1") as opened:
        found.append(opened.store.fingerprint)
    assert found[2] == found[3]
    assert len(set(found)) == 4


@pytest.fixture
def sound(cases: dict[str, Case]) -> tuple[Path, Path]:
    return cases["a tied head"].model, cases["a tied head"].adapter


UP = "base_model.model.model.layers.0.mlp.up_proj"
Tensors = dict[str, Any]


def lost_half(tensors: Tensors) -> None:
    del tensors[f"{UP}.lora_B.weight"]


def other_place(tensors: Tensors) -> None:
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = np.zeros((4, 4))


def of_tied_head(tensors: Tensors) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 4), np.float32)


def of_the_embedding(tensors: Tensors) -> None:
    name = "base_model.model.model.embed_tokens.lora_A.weight"
    tensors[name] = np.zeros((4, 4), np.float32)


def no_prefix(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors[f"{UP}.lora_A.weight"][0]


def integers(tensors: Tensors) -> None:
    tensors[f"{UP}.lora_A.weight"] = tensors[f"{UP}.lora_A.weight"].astype(np.int8)


def other_columns(tensors: Tensors) -> None:
    tensors[f"{UP}.lora_A.weight"] = np.zeros((RANK, 3), np.float32)


def other_rank(tensors: Tensors) -> None:
    tensors[f"{UP}.lora_B.weight"] = tensors[f"{UP}.lora_B.weight"][:, 1:].copy()


def nothing(tensors: Tensors) -> None:
    tensors.clear()


def the_tied_embedding(tensors: Tensors) -> None:
    table = np.zeros((131, 66), np.float32)
    tensors["base_model.model.model.embed_tokens.weight"] = table


def a_vector(tensors: Tensors) -> None:
    tensors[f"{UP}.lora_A.weight"] = np.zeros(3, np.float32)


def whole_of_another(tensors: Tensors) -> None:
    tensors["base_model.model.model.norm.weight"] = np.zeros(7, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost_half, r"up_proj\.weight has only .*lora_A\.weight"),
        (other_place, r"layers\.9\.mlp\.up_proj\.lora_A\.weight has no place in .*family qwen3"),
        (of_tied_head, r"lm_head\.lora_A\.weight has no place"),
        (of_the_embedding, r"embed_tokens\.lora_A\.weight has no place"),
        (no_prefix, r"tensor model\.norm\.weight has no place"),
        (integers, r"up_proj\.lora_A\.weight is I8; F32, F16 and BF16 are supported"),
        (other_columns, r"lora_A\.weight has shape \[4, 3\], and .* takes \[4, \d+\]"),
        (other_rank, r"lora_B\.weight has shape \[\d+, 3\], and .* takes \[\d+, 4\]"),
        (nothing, "holds nothing"),
        (the_tied_embedding, "uses one table for embedding and head"),
        (a_vector, r"lora_A\.weight has shape \[3\]"),
        (whole_of_another, r"norm\.weight has shape \[7\]"),
    ],
)
def test_tensors_that_do_not_fit(
    sound: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[Tensors], None],
    message: str,
) -> None:
    model, adapter = sound
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(model, lora=folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and LORA is supported; merge the adapter"),
        ({"use_dora": True}, "use_dora is set .* merge the adapter"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the model's own weights; merge"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": "many"}, "lora_alpha is 'many', not a usable number"),
        ({"lora_alpha": True}, "lora_alpha is True, not a usable number"),
        ({"alpha_pattern": [1]}, "alpha_pattern is .*not a table"),
        (
            {"alpha_pattern": {"(a+)+$": 1}},
            r"alpha_pattern has '\(a\+\)\+\$', and names of modules",
        ),
        ({"alpha_pattern": {"up_proj": None}}, "lora_alpha is None"),
    ],
)
def test_settings_of_another_kind(
    sound: tuple[Path, Path], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    model, adapter = sound
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(model, lora=folder)


def test_folders_that_are_no_adapter(sound: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = sound
    for lora in (model, tmp_path / "missing", model / "config.json"):
        with pytest.raises(CheckpointError, match=r"is no LoRA adapter: it has no adapter_config"):
            Checkpoint.open(model, lora=lora)
    with pytest.raises(RequestError, match="is not a path"):
        Checkpoint.open(model, lora="\0")
    with pytest.raises(CheckpointError, match=f"{re.escape(str(adapter))} is a LoRA adapter of"):
        Checkpoint.open(adapter)
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="adapter_model"):
        Checkpoint.open(model, lora=folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"cannot open .*adapter_model\.safetensors"):
        Checkpoint.open(model, lora=folder)
    weights.symlink_to(adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="is a link to"):
        Checkpoint.open(model, lora=folder)


def assert_holds(opened: Checkpoint, case: Case, *, nearly: tuple[str, ...] = ()) -> None:
    """All weights by their roles, whole and a slice of them."""
    config = json.loads((case.meant / "config.json").read_text())
    family, spec = read_family(config, source="test")
    for role, shape in tensor_shapes(opened.spec).items():
        is_tied = role == "head" and spec.tied_embeddings
        wanted = case.expected[family.tensor_name("embedding" if is_tied else role)]
        tolerance = 1e-3 if role in nearly else 1e-6
        name = opened.tensor_name(role)
        np.testing.assert_allclose(opened.store.read(name), wanted, rtol=tolerance, atol=tolerance)
        rows = range(shape[0] // 3, shape[0] // 2)
        some = opened.store.read(name, rows=rows)
        np.testing.assert_allclose(
            some, wanted[rows.start : rows.stop], rtol=tolerance, atol=tolerance
        )
        if len(shape) == 2:
            columns = range(5, shape[1] - 2)
            some = opened.store.read(name, rows=rows, columns=columns)
            part = wanted[rows.start : rows.stop, columns.start : columns.stop]
            np.testing.assert_allclose(some, part, rtol=tolerance, atol=tolerance)
