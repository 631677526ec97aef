"""What a GGUF file says of a model is what the config.json that it was made from says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import CheckpointError
from edge.models.families import read_family
from edge.models.gguf import ARCHITECTURES, describe_gguf, tensor_name, unknown_tensors
from edge.models.spec import ModelSpec, tensor_shapes
from tests.support import gguf_bytes
from tests.support.checkpoints import FAMILIES, IN_BLOCKS, make_checkpoint
from tests.support.gguf_files import Type, write_gguf

SHAPES = {name: tensor.shape for name, tensor in gguf_bytes.tensors().items()}

LLAMA = {**gguf_bytes.METADATA, "tokenizer.ggml.tokens": ("a", "b", "c")}


def described(
    *left_out: str, shapes: Any = None, factors: Any = None, **changes: object
) -> ModelSpec:
    metadata = {key: value for key, value in LLAMA.items() if key not in left_out}
    metadata |= {f"llama.{key}".replace("__", "."): value for key, value in changes.items()}
    model = describe_gguf(metadata, shapes or SHAPES, rope_factors=factors, source="it.gguf")
    return read_family(model.values, source="it.gguf", names=model.keys)[1]


@pytest.mark.parametrize(
    "name", [*(each for each in FAMILIES if each != "qwen2"), *IN_BLOCKS]
)  # no key says from which layer on that one has a window
def test_every_family_is_described_as_by_its_own_file(name: str, tmp_path: Path) -> None:
    from edge.weights.checkpoint import Checkpoint

    made = make_checkpoint(tmp_path / "made", name, layers=2)
    write_gguf(tmp_path / "it.gguf", made.path, kind=Type.F16)
    with Checkpoint.open(tmp_path / "it.gguf") as opened:
        found = opened.spec
    mixer, expected = found.layer(0).mixer, made.spec.layer(0).mixer
    np.testing.assert_allclose(mixer.inverse_frequencies, expected.inverse_frequencies, rtol=2e-7)
    scaled = json.loads((made.path / "config.json").read_text())["rope_parameters"]["rope_type"]
    if scaled == "llama3":  # by divisors, which are float32
        assert mixer.inverse_frequencies != expected.inverse_frequencies
    else:
        assert found == made.spec


def test_sizes_that_the_file_need_not_say() -> None:
    spec = described("llama.vocab_size", "llama.rope.dimension_count", "llama.rope.freq_base")
    assert spec.vocab_size == 3
    assert spec.layer(0).mixer.head_size == 4
    assert spec.norm_epsilon == 1e-5
    assert spec.tied_embeddings
    assert not described(shapes={**SHAPES, "output.weight": (290, 8)}).tied_embeddings
    alike = described(attention__head_count=np.array([2, 2], np.int32))
    assert alike.layer(0).mixer.num_heads == 2


def test_linear_scaling_by_its_new_key_and_by_its_old_one() -> None:
    plain = described().layer(0).mixer.inverse_frequencies
    assert described(rope__scaling__type="none").layer(0).mixer.inverse_frequencies == plain
    for changes in (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
    ):
        found = described(**changes).layer(0).mixer.inverse_frequencies
        np.testing.assert_allclose(found, np.array(plain) / 4)


def test_divisors_of_frequencies() -> None:
    plain = described().layer(0).mixer.inverse_frequencies
    found = described(factors=np.array([1.0, 8.0], np.float32)).layer(0).mixer.inverse_frequencies
    np.testing.assert_allclose(found, np.array(plain) / [1, 8])
    for wrong in ([1.0], [1.0, 0.0], [1.0, np.nan], [1.0, -8.0]):
        with pytest.raises(CheckpointError, match="factors must be 2 positive numbers"):
            described(factors=np.array(wrong, np.float32))


def test_rows_are_turned_in_one_architecture_only() -> None:
    for name, architecture in ARCHITECTURES.items():
        assert architecture.interleaves == (name == "llama")
    model = describe_gguf(LLAMA, SHAPES, rope_factors=None, source="it")
    assert model.interleaved(1, 4) == {
        f"blk.0.attn_{part}.{kind}": 4 for part in "qk" for kind in ("weight", "bias")
    }


def test_tensors_without_a_place_are_told() -> None:
    known = [tensor_name(role) for role in tensor_shapes(described())]
    assert set(SHAPES) - {"rope_freqs.weight"} == set(known) - {"output.weight"}
    assert unknown_tensors(SHAPES, known) == []
    others = ("blk.0.attn_sinks", "blk.0.ffn_gate_exps.weight", "blk.0.attn_rot_embd.weight")
    assert unknown_tensors(others, known) == list(others[:2])


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"attention__head_count": 0}, r"llama\.attention\.head_count must lie in 1"),
        ({"block_count": "two"}, r"llama\.block_count must be an integer, not 'two'"),
        ({"block_count": 1 << 40}, r"llama\.block_count must lie in"),
        ({"embedding_length": 2.5}, r"llama\.embedding_length must be an integer"),
        ({"attention__head_count": 3}, "num_heads|head"),
        ({"attention__head_count_kv": np.array([1, 2])}, "differs from layer to layer"),
        ({"attention__head_count_kv": np.array([], np.int32)}, "differs from layer to layer"),
        ({"rope__freq_base": float("nan")}, r"llama\.rope\.freq_base"),
        ({"rope__dimension_count": 2}, "a rotation of a part of each head is not computed"),
        ({"attention__value_length": 8}, "values of another size than keys"),
        ({"rope__scaling__type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"rope__scaling__type": 7}, "rope scaling 7 is not supported"),
        ({"expert_count": 8}, r"llama\.expert_count is 8, and such models are not computed"),
        ({"attention__causal": False}, r"llama\.attention\.causal is False"),
        ({"attention__key_length": 5}, "head"),
    ],
)
def test_what_is_not_computed_is_refused_by_the_names_of_the_file(
    changes: dict[str, object], cause: str
) -> None:
    with pytest.raises(CheckpointError, match=cause) as caught:
        described(**changes)
    assert str(caught.value).startswith("it.gguf: ")


def test_both_ways_of_scaling_at_once() -> None:
    with pytest.raises(CheckpointError, match="scaled both by"):
        described(rope__scale_linear=2.0, factors=np.ones(2, np.float32))


@pytest.mark.parametrize("key", [each for each in LLAMA if each.endswith(("_count", "_length"))])
def test_missing_keys_are_named(key: str) -> None:
    if key in ("llama.attention.head_count_kv", "llama.rope.dimension_count"):
        described(key)
        return
    with pytest.raises(CheckpointError, match=f"{key} is missing; download the file again"):
        described(key)


def test_unknown_architectures_name_those_that_are_known() -> None:
    for name in ("mamba", None, 7):
        with pytest.raises(CheckpointError, match="it runs llama, qwen2, qwen3"):
            describe_gguf({"general.architecture": name}, {}, rope_factors=None, source="it.gguf")
