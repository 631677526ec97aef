"""A peer whose back end lacks a kernel that the model needs gets no layers, and one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from edge.backends.triton.backend import TritonBackend
from edge.errors import RequestError
from edge.models.families import FAMILIES, read_family
from edge.models.spec import ALL_NEEDS, ModelSpec
from edge.planning.able_peers import able_peers, needs_of, some_able_peers
from edge.weights.formats import weight_format
from tests.support.peer_infos import peer_info
from tests.support.plans import make_plan

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size_per_layer_input": 0,
}
GPU = peer_info("gpu", backend="triton", lacks=tuple(sorted(TritonBackend.lacks)))
CPU = peer_info("cpu")


def spec_of(family: str) -> ModelSpec:
    values = {"model_type": family, **SIZES}
    if family.startswith("lfm2"):
        values["layer_types"] = ["conv", "conv", "full_attention", "conv"]
    return read_family(values, source="here")[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_needs_are_known(family: str) -> None:
    spec = spec_of(family)
    assert set(spec.needs) <= ALL_NEEDS
    assert {part.kind for kind in spec.kinds for part in kind.parts} <= set(spec.needs)


@pytest.mark.parametrize(
    ("family", "lacking"),
    [
        ("llama", ""),
        ("gemma3_text", ""),
        ("mixtral", ""),
        ("gpt_oss", ""),
        ("lfm2", ""),
        ("qwen3_5_text", ""),
        ("qwen3_next", ""),
        ("gpt2", ""),
        ("glm4_moe_lite", ""),
        ("gemma4_text", ""),
    ],
)
def test_gpus_are_left_out_where_they_lack_kernels(family: str, lacking: str) -> None:
    able, sentences = able_peers([GPU, CPU], spec_of(family).needs)
    if not lacking:
        assert (able, sentences) == ([GPU, CPU], [])
        return
    assert able == [CPU]
    (sentence,) = sentences
    assert sentence.startswith("gpu is not used: its back end triton has no kernel for ")
    found = sentence.partition("no kernel for ")[2].partition(", which")[0]
    assert sorted(found.split(", ")) == sorted(lacking.split(", "))
    assert "--backend ort" in sentence


def test_codes_of_latent_rows_are_refused() -> None:
    """A row in float32 is smaller than codes of what it stands for."""
    spec = spec_of("glm4_moe_lite")
    form = weight_format(spec, "float32")
    assert needs_of(spec, form, "float32") == spec.needs
    for dtype in ("int8", "int4"):
        with pytest.raises(RequestError, match=f"in float32, and {dtype} was asked for"):
            needs_of(spec, form, dtype)


def test_gpus_compute_small_gemma4() -> None:
    values = {**SIZES, "model_type": "gemma4_text", "num_kv_shared_layers": 2}
    values |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131}
    values["layer_types"] = ["sliding_attention", "full_attention"] * 2
    spec = read_family(values, source="here")[1]
    assert {"inputs of each layer by token", "keys of another layer"} <= set(spec.needs)
    assert able_peers([GPU, CPU], spec.needs) == ([GPU, CPU], [])


def spec_without_kernels() -> ModelSpec:
    values = {**SIZES, "model_type": "gemma4_text", "enable_moe_block": True, "top_k_experts": 2}
    return read_family(values, source="here")[1]


def test_gpus_are_left_out_of_gemma4_with_experts() -> None:
    able, (sentence,) = able_peers([GPU, CPU], spec_without_kernels().needs)
    assert able == [CPU]
    assert "experts with norms of their own" in sentence


def test_where_nobody_is_able_or_a_plan_by_hand_names_one_that_is_not() -> None:
    spec = spec_without_kernels()
    with pytest.raises(RequestError, match="no peer can compute this model: gpu is not used"):
        some_able_peers([GPU], spec.needs, "auto")
    assert some_able_peers([GPU, CPU], spec.needs, "auto")[0] == [CPU]
    plan = make_plan(spec, "solo", model="m", devices=["gpu"])
    with pytest.raises(RequestError, match=r"by hand gives layers to gpu: its .*; start .* ort"):
        some_able_peers([GPU, CPU], spec.needs, plan)
    plan = make_plan(spec, "solo", model="m", devices=["cpu"])
    assert some_able_peers([GPU, CPU], spec.needs, plan)[0] == [CPU]
    assert some_able_peers([], spec.needs, plan) == ([], [])
