"""Matrices of several roles in one tensor are read as if each were its own; and text parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from edge.errors import CheckpointError
from edge.models.families import read_family
from edge.models.spec import tensor_shapes
from edge.offload import MemoryStore
from edge.weights.checkpoint import Checkpoint
from edge.weights.fused_rows import (
    FusedStore,
    TensorPart,
    rows_of,
    rows_of_each,
    turned,
    with_fused_rows,
)
from tests.support.checkpoints import make_checkpoint

TABLE = np.arange(30, dtype=np.float32).reshape(6, 5)
PARTS = {"q": rows_of("qkv", range(4)), "k": rows_of("qkv", range(4, 6))}


def fused() -> FusedStore:
    return FusedStore(MemoryStore({"qkv": TABLE, "other": TABLE[:2]}), PARTS)


def test_parts_are_tensors_and_the_whole_is_none() -> None:
    store = fused()
    assert store.names() == ("k", "other", "q")
    assert store.shape("q") == (4, 5)
    assert store.dtype("k") == np.float32
    assert store.where("k") == "memory"
    np.testing.assert_array_equal(store.read("k"), TABLE[4:])
    np.testing.assert_array_equal(store.read("q", range(1, 3), range(2, 4)), TABLE[1:3, 2:4])
    np.testing.assert_array_equal(store.read("k", columns=range(1)), TABLE[4:, :1])
    np.testing.assert_array_equal(store.read("other"), TABLE[:2])
    with pytest.raises(ValueError, match="not a run within"):
        store.read("k", range(3))
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read("q")


def test_what_is_taken_from_where_is_part_of_the_fingerprint() -> None:
    plain = MemoryStore({"qkv": TABLE})
    others = {**PARTS, "k": rows_of("qkv", range(3, 6))}
    prints = {plain.fingerprint, FusedStore(plain, PARTS).fingerprint}
    assert len(prints | {FusedStore(plain, others).fingerprint}) == 3
    assert with_fused_rows(MemoryStore({"q": TABLE}), PARTS).names() == ("q",)


def test_a_fused_tensor_of_another_height_is_refused_by_its_name() -> None:
    with pytest.raises(CheckpointError, match=r"tensor qkv has shape \[5, 5\].* makes it 6 rows"):
        FusedStore(MemoryStore({"qkv": TABLE[:5]}), PARTS)


def test_rows_of_heads_and_matrices_of_a_stack() -> None:
    """Every run of rows, also within a head and over several."""
    parts: dict[str, TensorPart] = {
        "q": rows_of_each("qk", 3, range(2), 5),
        "k": rows_of_each("qk", 3, range(2, 5), 5),
        "gate": rows_of("experts", range(2), number=1),
        "up": rows_of("experts", range(2, 6), number=1),
    }
    table, stack = np.arange(60).reshape(15, 4), np.arange(60).reshape(2, 6, 5)
    store = FusedStore(MemoryStore({"qk": table, "experts": stack}), parts)
    heads = table.reshape(3, 5, 4)
    wanted = {
        "q": heads[:, :2].reshape(6, 4),
        "k": heads[:, 2:].reshape(9, 4),
        "gate": stack[1, :2],
        "up": stack[1, 2:],
    }
    assert store.names() == ("gate", "k", "q", "up")
    for name, whole in wanted.items():
        assert store.shape(name) == whole.shape
        for start, stop in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
            found = store.read(name, range(start, stop), range(1, 3))
            np.testing.assert_array_equal(found, whole[start:stop, 1:3])
            assert found.flags.c_contiguous
    with pytest.raises(CheckpointError, match=r"experts has shape \[1, 6, 5\].* 2 x 6 rows"):
        FusedStore(MemoryStore({"qk": table, "experts": stack[:1]}), parts)


def test_experts_in_one_tensor_are_those_of_tensors_of_their_own(tmp_path: Path) -> None:
    """Both are there of Qwen3.5; heads that predict further tokens are read over."""
    made = make_checkpoint(tmp_path / "qwen3_5_moe", "qwen3_5_moe", layers=3)
    with Checkpoint.open(made.path) as opened:
        names = {role: opened.tensor_name(role) for role in tensor_shapes(opened.spec)}
        apart = {role: opened.store.read(name) for role, name in names.items()}
    path = made.path / "model.safetensors"
    raw = load_file(path)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        of_all = [
            [raw.pop(f"{prefix}{number}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for number in range(6)
        ]
        raw[f"{prefix}gate_up_proj"] = np.stack([np.concatenate(each[:2]) for each in of_all])
        raw[f"{prefix}down_proj"] = np.stack([each[2] for each in of_all])
    raw["mtp.layers.0.input_layernorm.weight"] = np.ones(66, np.float32)
    save_file(raw, path)
    with Checkpoint.open(made.path) as opened:
        for role, values in apart.items():
            np.testing.assert_array_equal(opened.store.read(names[role]), values)


def test_phi3_has_the_rows_of_its_fused_matrices(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "phi3", "phi3", layers=2)
    raw = load_file(made.path / "model.safetensors")
    with Checkpoint.open(made.path) as opened:
        assert opened.spec == made.spec
        names = {role: opened.tensor_name(role) for role in tensor_shapes(opened.spec)}
        assert set(names.values()) == set(opened.store.names())
        key = opened.store.read(names["layers.1.key.weight"])
        np.testing.assert_array_equal(key, raw["model.layers.1.self_attn.qkv_proj.weight"][64:96])
        up = opened.store.read(names["layers.0.up.weight"])
        np.testing.assert_array_equal(up, raw["model.layers.0.mlp.gate_up_proj.weight"][90:])


def test_a_text_part_is_found_under_all_names(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "mistral3", "mistral3", layers=2)
    path = made.path / "model.safetensors"
    raw = load_file(path)
    prefix = "language_model.model."
    assert f"{prefix}embed_tokens.weight" in raw
    for new, head in ((prefix, ""), ("model.language_model.", "lm_head."), ("model.", "lm_head.")):
        named = {name.replace(prefix, new): values for name, values in raw.items()}
        if head:
            named[f"{head}weight"] = raw[f"{prefix}embed_tokens.weight"] + 1
        save_file(named, path)
        with Checkpoint.open(made.path) as opened:
            assert opened.spec.family == "ministral3"
            assert opened.spec.tied_embeddings != bool(head)
            found = opened.store.read(opened.tensor_name("head"))
            assert found[0, 0] == raw[f"{prefix}embed_tokens.weight"][0, 0] + bool(head)


def test_old_names_of_gemma_3_mean_the_same(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "gemma3", "gemma3")
    values: dict[str, Any] = json.loads((made.path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values |= {
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "rope_scaling": {"rope_type": "linear", "factor": rope["full_attention"]["factor"]},
    }
    assert read_family(values, source="here")[1] == made.spec
    values |= {"layer_types": None, "sliding_window_pattern": 3}
    kinds = read_family(values, source="here")[1].layers
    assert kinds == (0, 0, 1, 0)


@pytest.mark.parametrize("name", ["mistral3", "gemma3"])
@pytest.mark.parametrize("text", ["mistral", "ministral3", "gemma3_text"])
def test_a_text_part_that_leaves_out_what_is_usual_is_that_of_transformers(
    name: str, text: str
) -> None:
    if (name == "gemma3") != (text == "gemma3_text"):
        return
    config: Any = transformers.AutoConfig.for_model(text)
    values = {"model_type": name, "text_config": {"model_type": text}}
    spec = read_family(values, source="here")[1]
    mixer, feed_forward = spec.attention, spec.kinds[0].feed_forward
    assert spec.vocab_size == config.vocab_size
    assert spec.hidden_size == config.hidden_size
    assert spec.num_layers == config.num_hidden_layers
    assert feed_forward.columns == config.intermediate_size
    assert mixer.num_heads == config.num_attention_heads
    assert mixer.num_kv_heads == config.num_key_value_heads
    assert mixer.head_size == (config.head_dim or config.hidden_size // mixer.num_heads)
    assert mixer.window == config.sliding_window
    assert spec.norm_epsilon == config.rms_norm_eps


def test_columns_are_rows_of_another_matrix() -> None:
    parts = {
        "q": turned("qk", range(3), 6),
        "k": turned("qk", range(3, 5), 6),
    }
    store = FusedStore(MemoryStore({"qk": TABLE}), parts)
    assert (store.shape("q"), store.shape("k")) == ((3, 6), (2, 6))
    np.testing.assert_array_equal(store.read("q"), TABLE.T[:3])
    np.testing.assert_array_equal(store.read("k", range(1, 2), range(2, 5)), TABLE.T[4:, 2:5])
    taller = {"q": turned("qk", range(5), 7)}
    with pytest.raises(CheckpointError, match=r"\[6, 5\], and the configuration makes it 7 x 5"):
        FusedStore(MemoryStore({"qk": TABLE}), taller)


def test_gpt2_is_read_by_its_names_and_by_bare_ones(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "gpt2", layers=2)
    expected = made.llama_weights
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((made.path / name).read_bytes())
    tensors = load_file(made.path / "model.safetensors")
    assert all(name.startswith("transformer.") for name in tensors)
    mask = np.ones((1, 1, 4, 4), np.float32)
    others = {f"h.{number}.attn.bias": mask for number in range(2)}
    named = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    save_file({**named, **others}, bare / "model.safetensors")
    for path in (made.path, bare):
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.spec.tied_embeddings
            shapes = tensor_shapes(checkpoint.spec)
            for (role, shape), values in zip(shapes.items(), expected.values(), strict=True):
                found = checkpoint.store.read(checkpoint.tensor_name(role))
                assert found.shape == shape
                np.testing.assert_array_equal(found, values)
