"""What a GGUF file says of a model is what the config.json that it was made from says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import CheckpointError
from edge.models.families import read_family
from edge.models.gguf import describe_gguf, unknown_tensors
from edge.models.gguf_architectures import ARCHITECTURES
from edge.models.spec import ModelSpec, tensor_shapes
from tests.support import gguf_bytes
from tests.support.checkpoints import make_checkpoint
from tests.support.family_sizes import EXPERTS_IN_BLOCKS, FAMILIES, IN_BLOCKS
from tests.support.gguf_files import Type, write_gguf

SHAPES = {name: tensor.shape for name, tensor in gguf_bytes.tensors().items()}

LLAMA = {**gguf_bytes.METADATA, "tokenizer.ggml.tokens": ("a", "b", "c")}


def described(
    *left_out: str, shapes: Any = None, factors: Any = None, **changes: object
) -> ModelSpec:
    metadata = {key: value for key, value in LLAMA.items() if key not in left_out}
    metadata |= {f"llama.{key}".replace("__", "."): value for key, value in changes.items()}
    found = {} if factors is None else {"rope_freqs.weight": factors}
    model = describe_gguf(metadata, shapes or SHAPES, rope_factors=found, source="it.gguf")
    return read_family(model.values, source="it.gguf", names=model.keys)[1]


@pytest.mark.parametrize(
    "name",
    [
        *(each for each in FAMILIES if each != "qwen2"),
        *IN_BLOCKS,
        *EXPERTS_IN_BLOCKS,
        "glm4",
        "glm4_moe",
        "granite",
        "ministral3",
        "mixtral",
        "olmo2",
        "olmo3",
    ],
)  # no key says from which layer on qwen2 has a window
def test_every_family_is_described_as_by_its_own_file(name: str, tmp_path: Path) -> None:
    from edge.weights.checkpoint import Checkpoint

    made = make_checkpoint(tmp_path / "made", name, layers=2)
    write_gguf(tmp_path / "it.gguf", made.path, kind=Type.F16)
    with Checkpoint.open(tmp_path / "it.gguf") as opened:
        found = opened.spec
    mixer, expected = found.attention, made.spec.attention
    np.testing.assert_allclose(
        mixer.rotary.inverse_frequencies, expected.rotary.inverse_frequencies, rtol=2e-7
    )
    scaled = json.loads((made.path / "config.json").read_text())["rope_parameters"].get("rope_type")
    if name == "granite":  # its numbers are float32 in the file
        assert found.embedding_scale == pytest.approx(made.spec.embedding_scale)
        assert found.norm_epsilon == pytest.approx(made.spec.norm_epsilon)
        assert mixer.score_scale == pytest.approx(expected.score_scale)
    elif scaled == "llama3":  # by divisors, which are float32
        assert mixer.rotary.inverse_frequencies != expected.rotary.inverse_frequencies
    else:
        assert found == made.spec


def test_sizes_that_the_file_need_not_say() -> None:
    spec = described("llama.vocab_size", "llama.rope.dimension_count", "llama.rope.freq_base")
    assert spec.vocab_size == 3
    assert spec.attention.head_size == 4
    assert spec.norm_epsilon == 1e-5
    assert spec.tied_embeddings
    assert not described(shapes={**SHAPES, "output.weight": (290, 8)}).tied_embeddings
    alike = described(attention__head_count=np.array([2, 2], np.int32))
    assert alike.attention.num_heads == 2


def test_linear_scaling_by_its_new_key_and_by_its_old_one() -> None:
    plain = described().attention.rotary.inverse_frequencies
    assert described(rope__scaling__type="none").attention.rotary.inverse_frequencies == plain
    for changes in (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
    ):
        found = described(**changes).attention.rotary.inverse_frequencies
        np.testing.assert_allclose(found, np.array(plain) / 4)


def test_yarn_scaling() -> None:
    """Its gain over the usual one is a key of its own."""
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    keys = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    found = described(**keys).attention.rotary
    assert found.inverse_frequencies != described().attention.rotary.inverse_frequencies
    assert found.scale == pytest.approx(1 + 0.1 * np.log(4))
    more = described(**keys, rope__scaling__attn_factor=2.0).attention.rotary
    assert more.scale == pytest.approx(2 * found.scale)
    assert more.inverse_frequencies == found.inverse_frequencies


def test_divisors_of_frequencies() -> None:
    plain = described().attention.rotary.inverse_frequencies
    found = described(factors=np.array([1.0, 8.0], np.float32)).attention.rotary.inverse_frequencies
    np.testing.assert_allclose(found, np.array(plain) / [1, 8])
    for wrong in ([1.0], [1.0, 0.0], [1.0, np.nan], [1.0, -8.0]):
        with pytest.raises(CheckpointError, match="factors must be 2 positive numbers"):
            described(factors=np.array(wrong, np.float32))


def test_rows_are_turned_in_some_architectures_only() -> None:
    for name, architecture in ARCHITECTURES.items():
        assert architecture.interleaves == (name in ("llama", "granite", "mistral3", "smollm3"))
    model = describe_gguf(LLAMA, SHAPES, rope_factors={}, source="it")
    assert model.interleaved(1, 4) == {
        f"blk.0.attn_{part}.{kind}": 4 for part in "qk" for kind in ("weight", "bias")
    }


def test_tensors_without_a_place_are_told() -> None:
    known = [ARCHITECTURES["llama"].tensor_name(role) for role in tensor_shapes(described())]
    assert set(SHAPES) - {"rope_freqs.weight"} == set(known) - {"output.weight"}
    assert unknown_tensors(SHAPES, known, 1) == []
    others = ("blk.0.attn_sinks", "blk.0.ffn_gate_exps.weight", "blk.0.attn_rot_embd.weight")
    assert unknown_tensors(others, known, 1) == list(others[:2])
    assert unknown_tensors(["blk.1.attn_sinks"], known, 1) == []  # behind the last layer


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
        (
            {"rope__dimension_count": 2},
            "a rotation of a part of each head, in this order of rows, is not computed",
        ),
        (
            {"rope__dimension_count": float(gguf_bytes.METADATA["llama.rope.dimension_count"])},
            r"llama\.rope\.dimension_count is [0-9]+\.0 where a head has",
        ),
        ({"attention__value_length": 8}, "values of another size than keys"),
        ({"rope__scaling__type": "yarn"}, "factor must be positive"),
        ({"rope__scaling__type": "other"}, "rope_type 'other' is not supported"),
        ({"rope__scaling__type": 7}, "rope_type 7 is not supported"),
        ({"expert_count": 8, "expert_used_count": 9}, "cannot go through 9 of 8 experts"),
        (
            {"expert_count": 1024, "expert_used_count": 2, "block_count": 4096},
            "at most 65536 experts in all",
        ),
        ({"expert_gating_func": 2}, r"llama\.expert_gating_func is 2, and such models are not"),
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
        with pytest.raises(CheckpointError, match="it runs gemma2, gemma3, gemma4, glm4"):
            describe_gguf({"general.architecture": name}, {}, rope_factors={}, source="it.gguf")
