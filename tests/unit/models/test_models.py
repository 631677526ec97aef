"""`config.json` of every family and every age becomes the same data, or one clear sentence."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from edge.errors import CheckpointError
from edge.kernels.gated_mlp.reference import Clamp
from edge.models.attention import Attention
from edge.models.experts import Experts, SharedExpert
from edge.models.families import FAMILIES, read_family
from edge.models.gated_mlp import GatedMlp
from edge.models.linear_attention import LinearAttention
from edge.models.parts import MAX_SIZE
from edge.models.rotary import Rotary
from edge.models.short_convolution import ShortConvolution
from edge.models.spec import LayerSpec, ModelSpec, by_kind, tensor_shapes
from edge.weights.fused_rows import fused_rows
from tests.support.specs import changed, plain_layer, plain_spec, shape, spec_of

hub: Any = transformers
"""The same module; parts of it carry no types."""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def describe(model_type: str = "llama", **values: Any) -> ModelSpec:
    config = {"model_type": model_type, **SIZES, **values}
    return read_family(config, source="config.json")[1]


def frequencies(**values: Any) -> tuple[float, ...]:
    found: tuple[float, ...] = shape(describe(**values)).rotary.inverse_frequencies
    return found


def test_the_sizes_of_a_llama() -> None:
    spec = describe()
    assert spec == plain_spec(
        family="llama",
        num_layers=3,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=2,
        head_size=8,
        ffn_columns=90,
        vocab_size=131,
        context_tokens=256,
        norm_epsilon=1e-5,
        activation="silu",
        rotary=shape(spec).rotary,
        windows=(None, None, None),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        query_key_norm=False,
        tied_embeddings=False,
    )
    turned = shape(spec).rotary
    np.testing.assert_allclose(turned.inverse_frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert turned == Rotary(inverse_frequencies=turned.inverse_frequencies)


def test_what_a_config_leaves_out_has_the_family_s_default() -> None:
    assert shape(describe(num_key_value_heads=None)).num_kv_heads == 8
    assert shape(describe(head_dim=None)).head_size == 8
    assert shape(describe(head_dim=20)).head_size == 20
    assert shape(describe("qwen3")).head_size == 128
    assert describe(rms_norm_eps=None).norm_epsilon == 1e-6
    assert describe(max_position_embeddings=None).context_tokens == 2048


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", (True, True, True, False)),
        ("mistral", (False, False, False, False)),
        ("qwen2", (True, False, False, False)),
        ("qwen3", (True, True, True, True)),
    ],
)
def test_biases_and_head_norms(model_type: str, expected: tuple[bool, ...]) -> None:
    spec = describe(model_type, attention_bias=True, mlp_bias=True)
    assert (shape(spec).qkv_bias, shape(spec).output_bias) == expected[:2]
    assert shape(spec).query_key_norm == expected[3]


def test_biases_are_off_unless_asked_for() -> None:
    assert not shape(describe()).qkv_bias
    assert shape(describe("qwen2")).qkv_bias
    assert not shape(describe("qwen3")).qkv_bias


def test_old_and_new_rope_fields_mean_the_same() -> None:
    theta = 500000.0
    old = frequencies(rope_theta=theta)
    assert old == frequencies(rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert old != frequencies()
    scaled = frequencies(rope_theta=theta, rope_scaling=LLAMA3)
    assert scaled == frequencies(rope_parameters={**LLAMA3, "rope_theta": theta})
    assert scaled != old


def test_linear_scaling_is_written_in_two_ways() -> None:
    plain = np.asarray(frequencies())
    by_type = frequencies(rope_scaling={"type": "linear", "factor": 4.0})
    assert by_type == frequencies(rope_scaling={"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(by_type, plain / 4, rtol=1e-7)


@pytest.mark.parametrize("model_type", ["granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}, LLAMA3],
    ids=["default", "linear", "llama3"],
)
def test_frequencies_equal_those_of_transformers(model_type: str, rope: dict[str, Any]) -> None:
    config = hub.AutoConfig.for_model(
        model_type, **SIZES, head_dim=64, rope_parameters={**rope, "rope_theta": 10000.0}
    )
    with torch.device("meta"):
        model = hub.AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    values = json.loads(config.to_json_string(use_diff=False))
    spec = read_family({**values, "model_type": model_type, "head_dim": 64}, source="here")[1]
    found = shape(spec).rotary.inverse_frequencies
    np.testing.assert_allclose(found, rotary.inv_freq.numpy(), rtol=1e-6)


OTHER_MODULES = (
    *(
        "mixtral",
        "deepseek_v3",
        "glm4_moe_lite",
        "gemma4_text",
        "glm4_moe",
        "gpt2",
        "gpt_oss",
        "lfm2",
        "lfm2_moe",
        "qwen2_moe",
        "qwen3_moe",
    ),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""Modules of theirs have other names than files, or parts; end-to-end tests open such files."""


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in OTHER_MODULES])
def test_tensor_names_are_those_of_transformers(model_type: str) -> None:
    config = hub.AutoConfig.for_model(
        model_type, **SIZES, head_dim=8, attention_bias=True, mlp_bias=True
    )
    with torch.device("meta"):
        model = hub.AutoModelForCausalLM.from_config(config)
    values = json.loads(config.to_json_string(use_diff=False))
    family, spec = read_family(values, source="here")
    if model_type == "qwen3":  # it has a switch for the biases of attention only
        spec = changed(spec, mlp_bias=False)
    named = {family.tensor_name(role): size for role, size in tensor_shapes(spec).items()}
    for name, part in fused_rows(family.fused, spec, family.tensor_name).items():
        rows, *columns = named.pop(name)
        assert rows == part.num_rows
        named[part.tensor] = (*part.extent, *columns)
    if spec.tied_embeddings:
        model.tie_weights()
    assert named == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_windows_of_mistral() -> None:
    assert shape(describe("mistral", sliding_window=7)).windows == (7, 7, 7)
    assert shape(describe("mistral", sliding_window=None)).windows == (None, None, None)
    assert shape(describe("llama", sliding_window=7)).windows == (None, None, None)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_qwen(model_type: str) -> None:
    def windows(**values: Any) -> tuple[int | None, ...]:
        found = shape(describe(model_type, sliding_window=7, **values)).windows
        return tuple(found)

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows() == (None, None, None)
    assert windows(use_sliding_window=False, layer_types=kinds) == (None, None, None)
    assert windows(use_sliding_window=True, max_window_layers=1) == (None, 7, 7)
    assert windows(use_sliding_window=True, layer_types=kinds) == (7, None, 7)


def test_which_layers_have_experts() -> None:
    values = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = describe("qwen3_moe", **EXPERTS, **values)
    assert [spec.layer(n).feed_forward.kind == "experts" for n in range(6)] == [
        *(False, True, False),
        *(False, False, True),
    ]
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    shapes = tensor_shapes(spec)
    assert shapes["layers.1.experts.4.down.weight"] == (64, 24)
    assert shapes["layers.0.down.weight"] == (64, 90)


def test_a_shared_expert_is_cut_where_the_others_are() -> None:
    """Also where it has no multiple of their columns; and every weight is counted."""
    spec = describe("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=37)
    part = spec.layer(0).feed_forward
    assert isinstance(part, Experts)
    assert part.shared == SharedExpert(columns=37, is_gated=True)
    assert not part.renormalized
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    columns: list[int] = []
    for units in (range(7), range(7, 8), range(8, 24)):
        found = {each.name: each for each in part.matrices("layers.0.", 64, units)}
        down, local = found["layers.0.shared.down"], part.of_units(units)
        assert (down.num_rows, found["layers.0.router"].num_rows) == (64, 6)
        assert local is not None
        assert local.shared == SharedExpert(columns=len(down.columns), is_gated=True)
        columns += down.columns
    assert columns == list(range(37))
    weights = part.weights(64)
    counted = 24 * sum(count for _role, count in weights.unit.matrices)
    counted += sum(count for _role, count in weights.fixed.matrices)
    shapes = part.shapes(64)
    every = sum(math.prod(size) for role, size in shapes.items() if role != "mlp_norm")
    assert counted == pytest.approx(every, rel=1e-12)
    less = dataclasses.replace(part, shared=SharedExpert(columns=1, is_gated=True))
    few = less.of_units(range(3))
    assert few is not None
    assert few.shared is None, "the one column goes with the last of the others"
    assert next(less.matrices("", 64, range(3))).num_rows == 5


@pytest.mark.parametrize("rank", [None, 22])
def test_heads_of_a_latent_vector_are_cut_as_others_are(rank: int | None) -> None:
    """What turns is first in each head; every row and every weight is somewhere, once."""
    sizes = {"qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 12, "kv_lora_rank": 20}
    spec = describe("glm4_moe_lite", **sizes, q_lora_rank=rank, attention_bias=True)
    part = spec.layer(0).mixer
    assert isinstance(part, Attention)
    assert (part.num_heads, part.head_size, part.value_size) == (8, 16, 12)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    rows: dict[str, list[int]] = {}
    columns: list[int] = []
    for units in (range(3), range(3, 8)):
        found = {each.name: each for each in part.matrices("", 64, units)}
        first = found["query"].parts[0][1]
        assert first == range(16 * units.start + 10, 16 * units.start + 16)
        columns += found["output"].columns
        for role, run in found["query"].parts:
            rows.setdefault(role, []).extend(run)
        for number in range(len(units)):
            keys, values = found[f"keys_of_head.{number}"], found[f"values_of_head.{number}"]
            assert keys.is_transposed
            ((role, run),) = values.parts
            assert keys.parts == ((role, range(20)),), "the columns of the whole matrix"
            rows.setdefault(role, []).extend((*keys.columns, *run))
        held = [each.num_elements for each in part.vectors("", 64, units, is_first=True)]
    shapes, weights = part.shapes(64), part.weights(64)
    assert columns == list(range(96))
    for role, of_role in rows.items():
        assert sorted(of_role) == list(range(shapes[role][0]))
    unit = (*weights.unit.matrices, *weights.unit.transposed)
    counted = 8 * sum(count for _role, count in unit)
    counted += sum(count for _role, count in weights.fixed.matrices)
    assert counted == sum(math.prod(each) for each in shapes.values() if len(each) == 2)
    vectors = sum(math.prod(each) for each in shapes.values() if len(each) == 1)
    assert (weights.fixed.vector, sum(held)) == (vectors, vectors)
    for facts in ({"num_kv_heads": 4}, {"query_key_norm": True}, {"head_size": 6}):
        with pytest.raises(ValueError, match=r"latent|keys|head of"):
            dataclasses.replace(part, **facts)
    assert part.latent is not None
    with pytest.raises(ValueError, match="rows of 1025 elements"):
        dataclasses.replace(part.latent, rank=1019)


def test_a_block_beside_experts_has_norms_of_its_own_in_gemma4() -> None:
    """Those behind both are with every shard, and every weight is counted."""
    sizes = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
    usual = {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "head_dim": 8}
    spec = describe("gemma4_text", **usual, **sizes, tie_word_embeddings=True)
    part = spec.layer(0).feed_forward
    assert isinstance(part, Experts)
    assert part.is_apart
    assert part.shared == SharedExpert(columns=90, is_gated=False)
    assert spec.partial_parts == 2
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    weights, shapes = part.weights(64), part.shapes(64)
    vectors = [math.prod(each) for each in shapes.values() if len(each) == 1]
    assert weights.fixed.vector == sum(vectors)
    behind = {each.name for each in part.vectors("", 64, range(0), is_first=True)}
    assert behind == {"shared_post_norm", "experts_post_norm", "mlp_post_norm", "layer_scale"}
    held = [each.num_elements for each in part.vectors("", 64, range(3), is_first=False)]
    assert sum(held) == sum(vectors)
    with pytest.raises(ValueError, match="normed apart is a shared expert"):
        dataclasses.replace(part, shared=None)


NO_INPUTS = {"hidden_size_per_layer_input": 0}
SMALL_GEMMA = {
    "num_hidden_layers": 8,
    "head_dim": 8,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}


def test_later_layers_of_small_gemma4_have_keys_of_earlier_ones() -> None:
    """Each shard that has query heads of them makes those keys again; every weight is counted."""
    spec = describe("gemma4_text", **SMALL_GEMMA)
    keys = {number: each.keys_of for number, each in spec.attentions.items()}
    assert keys == {0: None, 1: None, 2: None, 3: None, 4: 2, 5: 3, 6: 2, 7: 3}
    assert [spec.kept(layer) for layer in (0, 3, 4, 7)] == [(), (2,), (2, 3), (3,)]
    assert spec.lenders == {layer for layer in range(8) if layer in spec.kept(layer + 1)} == {2, 3}
    assert [spec.layer(n).feed_forward.columns for n in (3, 4)] == [90, 180]
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    shapes = tensor_shapes(spec)
    assert shapes["token_table"] == (spec.vocab_size, 48)
    assert shapes["token_projection"] == (48, spec.hidden_size)
    assert "layers.3.key.weight" in shapes
    assert not {"layers.5.key.weight", "layers.5.value.weight", "layers.5.key_norm"} & set(shapes)
    mixer = spec.layer(5).mixer
    assert isinstance(mixer, Attention)
    (query, keys_values, output) = mixer.matrices("layers.5.", 64, range(mixer.num_heads))
    assert {role for role, _ in keys_values.parts} == {
        "layers.3.key.weight",
        "layers.3.value.weight",
    }
    held = sum(each.num_rows * len(each.columns) for each in (query, keys_values, output))
    counted = mixer.weights(64)
    assert held == sum(size for _, size in counted.unit.matrices) * mixer.num_heads + sum(
        size for _, size in counted.group.matrices
    ) * (mixer.num_kv_heads)
    vectors = list(mixer.vectors("layers.5.", 64, range(3), is_first=True))
    assert sum(each.num_elements for each in vectors) == counted.fixed.vector


def test_whoever_has_a_part_of_a_layer_has_what_it_makes_of_tokens() -> None:
    spec = describe("gemma4_text", **SMALL_GEMMA)
    part = spec.layer(2).feed_forward
    assert isinstance(part, GatedMlp)
    fixed = part.weights(64).fixed
    without = list(part.matrices("layers.2.", 64, range(0)))
    assert [each.name.split(".")[2] for each in without] == [
        "token_projection",
        "token_gate",
        "token_output",
    ]
    assert without[0].parts == (("token_projection", range(12, 18)),)
    assert sum(each.num_rows * len(each.columns) for each in without) == sum(
        size for _, size in fixed.matrices
    )
    vectors = list(part.vectors("layers.2.", 64, range(9), is_first=True))
    assert sum(each.num_elements for each in vectors) == fixed.vector


@pytest.mark.parametrize(
    ("numbers", "facts", "sentence"),
    [
        ((4,), {"keys_of": 4}, "layer 4 has keys of layer 4"),
        ((4,), {"keys_of": 9}, "layer 4 has keys of layer 9"),
        ((6,), {"keys_of": 4}, "layer 6 has keys of layer 4"),
        ((4,), {"keys_of": 3}, "keys of a layer with another"),
        ((4,), {"window": None}, "keys of a layer with another window"),
        ((2,), {"query_key_norm": False}, "keys of a layer with another query_key_norm"),
        ((2,), {"qkv_bias": True}, "keys that cannot be made once more"),
        ((4,), {"qkv_bias": True}, "has no further parts"),
        ((4,), {"keys_of": -1}, "keys of layer -1"),
        ((4,), {"keys_of": 2.0}, "keys of layer 2.0"),
    ],
)
def test_keys_of_layers_that_cannot_be_had(
    numbers: tuple[int, ...], facts: dict[str, Any], sentence: str
) -> None:
    """Whoever wrote the description: it comes over the wire."""
    spec = describe("gemma4_text", **SMALL_GEMMA)
    told = [spec.layer(number).to_json() for number in range(spec.num_layers)]
    for number in numbers:
        told[number]["mixer"] |= facts
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(spec, **by_kind([LayerSpec.from_json(each) for each in told]))


def test_windows_of_qwen2_with_experts() -> None:
    def windows(**values: Any) -> tuple[int | None, ...]:
        given = {"sliding_window": 7, "max_window_layers": 2, "num_hidden_layers": 4}
        return tuple(shape(describe("qwen2_moe", **EXPERTS, **{**given, **values})).windows)

    assert windows() == (None,) * 4
    assert windows(use_sliding_window=True) == (7, None, None, None)
    assert windows(use_sliding_window=True, max_window_layers=9) == (7, None, 7, None)


def test_gpt_oss_is_clamped_and_has_sinks_and_windows() -> None:
    spec = describe("gpt_oss", num_hidden_layers=4)
    config = hub.AutoConfig.for_model("gpt_oss")
    part, mixer = spec.layer(0).feed_forward, spec.attention
    assert isinstance(part, Experts)
    assert part.clamp == Clamp(limit=config.swiglu_limit, slope=config.swiglu_alpha)
    assert (part.bias, part.renormalized, part.shared) == (True, True, None)
    assert (part.num_experts, part.top_k) == (config.num_local_experts, config.num_experts_per_tok)
    assert (mixer.has_sinks, mixer.qkv_bias, mixer.output_bias, mixer.head_size) == (
        *(True, True, True),
        config.head_dim,
    )
    assert [each.window for each in spec.attentions.values()] == [128, None, 128, None]
    module = hub.models.gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(config)
    np.testing.assert_allclose(mixer.rotary.inverse_frequencies, module.inv_freq, rtol=1e-6)
    assert mixer.rotary.scale == pytest.approx(module.attention_scaling)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    half = mixer.of_units(range(4, 8))
    assert half is not None
    assert next(
        each.parts
        for each in mixer.vectors("", 64, range(4, 8), is_first=False)
        if each.name == "sinks"
    ) == (("sinks", range(4, 8)),)
    weights = part.weights(64)
    counted = 90 * weights.unit.vector + weights.fixed.vector
    shapes = part.shapes(64)
    assert counted == sum(math.prod(each) for each in shapes.values() if len(each) == 1)
    held = [each.num_elements for each in part.vectors("", 64, range(90), is_first=True)]
    assert sum(held) == counted


def test_short_convolutions_of_lfm2() -> None:
    spec = describe("lfm2", num_hidden_layers=4, full_attn_idxs=[2], conv_bias=True)
    assert list(spec.attentions) == [2]
    assert spec.has_states
    assert spec.tied_embeddings
    part = spec.layer(0).mixer
    assert isinstance(part, ShortConvolution)
    assert (part.num_units, part.channels, part.state_shapes) == (8, 64, ((2, 64),))
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    some = part.of_units(range(3, 5))
    assert some is not None
    assert some.state_shapes == ((2, 16),)
    weights, shapes = part.weights(64), part.shapes(64)
    matrices = 8 * sum(count for _role, count in weights.unit.matrices)
    assert matrices == sum(math.prod(each) for each in shapes.values() if len(each) == 2)
    vectors = 8 * weights.unit.vector + weights.fixed.vector
    assert vectors == sum(math.prod(each) for each in shapes.values() if len(each) != 2)
    held = [each.num_elements for each in part.vectors("", 64, range(8), is_first=True)]
    assert sum(held) == vectors


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ({}, 256),
        ({"intermediate_size": 700}, 512),
        ({"block_ff_dim": 700}, 512),
        ({"block_ff_dim": 700, "block_ffn_dim_multiplier": 1.2, "block_multiple_of": 10}, 560),
        ({"block_auto_adjust_ff_dim": False}, 90),
    ],
)
def test_columns_of_lfm2(values: dict[str, Any], columns: int) -> None:
    config = hub.AutoConfig.for_model("lfm2", **{**SIZES, **values})
    with torch.device("meta"):
        model = hub.AutoModelForCausalLM.from_config(config)
    assert model.model.layers[0].feed_forward.w1.weight.shape[0] == columns
    assert describe("lfm2", **values).layer(0).feed_forward.columns == columns


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_5_moe_text", "qwen3_next"])
def test_what_is_left_out_of_experts_is_usual(model_type: str) -> None:
    config = hub.AutoConfig.for_model(model_type)
    values = {"model_type": model_type, **SIZES, "num_hidden_layers": 4}
    if model_type == "qwen3_5_moe_text":
        del values["intermediate_size"]
    part = read_family(values, source="here")[1].layer(0).feed_forward
    assert isinstance(part, Experts)
    assert part == Experts(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        columns=config.moe_intermediate_size,
        activation="silu",
        renormalized=getattr(config, "norm_topk_prob", True),
        shared=SharedExpert(columns=config.shared_expert_intermediate_size, is_gated=True),
    )


def test_which_layers_are_linear_attention() -> None:
    spec = describe("qwen3_5_text", num_hidden_layers=8, linear_num_value_heads=48)
    assert [spec.layer(n).mixer.kind for n in range(8)] == 2 * (
        3 * ["linear_attention"] + ["attention"]
    )
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert (spec.attention.head_size, spec.attention.rotary.turned_elements) == (256, 64)
    shapes = tensor_shapes(spec)
    assert shapes["layers.3.query.weight"][0] == 2 * spec.attention.num_heads * 256
    assert shapes["layers.0.linear_convolution"] == (16 * 128 * 2 + 48 * 128, 1, 4)
    linear = spec.layer(0).mixer
    assert isinstance(linear, LinearAttention)
    part = linear.of_units(range(3, 8))
    assert part is not None
    assert part.state_shapes == ((3, 5 * 128 * 2 + 15 * 128), (15, 128, 128))
    assert 5 * linear.state_values == 16 * part.state_values
    every_other = describe("qwen3_5_text", num_hidden_layers=4, full_attention_interval=2)
    assert list(every_other.attentions) == [1, 3]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"model_type": "falcon"},
            "model_type 'falcon' is not a family Edge runs: the nearest is llama",
        ),
        (
            {"model_type": "gpt2", "n_embd": 100, "n_head": 7},
            "n_embd (100) must be a multiple",
        ),
        (
            {
                "model_type": "gemma4_text",
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
            },
            "num_experts is missing",
        ),
        (
            {"model_type": "gemma4_text", "vocab_size_per_layer_input": 7},
            "vocab_size_per_layer_input must be vocab_size",
        ),
        (
            {"model_type": "gemma4_text", **NO_INPUTS, "num_kv_shared_layers": 2},
            "num_kv_shared_layers: 2 of 3 layers share",
        ),
        (
            {"model_type": "gemma4_text", "enable_moe_block": True},
            "layers with experts have no such inputs",
        ),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["x"]}, "must be dense or sparse for"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": -1}, "must lie in 0..4096"),
        ({"model_type": "deepseek_v3", "v_head_dim": 999}, "with values of 999"),
        (
            {
                "model_type": "deepseek_v3",
                "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale_all_dim": 1e300},
            },
            "it has numbers that nothing can be computed with",
        ),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer must lie in 1"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "such a model has an encoder"),
        ({"model_type": "olmo3", "layer_types": ["x"]}, "layer_types must name one of"),
        ({"model_type": "phimoe"}, "the nearest is phi3, which lacks experts; it runs"),
        ({"model_type": "qwen3_moe"}, "num_experts is missing"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "through 2 of 1 experts"),
        ({"model_type": "mixtral", "num_local_experts": 10**6}, "num_local_experts must lie in 1"),
        (
            {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": ["1"]},
            "mlp_only_layers must be a list",
        ),
        ({"model_type": "glm4_moe", "n_group": 3}, "128 experts do not make 3 groups of 2 or more"),
        (
            {"model_type": "glm4_moe", "n_group": 64, "topk_group": 2},
            "through 8 experts of 2 of 64 groups of 2",
        ),
        ({"model_type": "glm4_moe", "scoring_func": "softmax"}, "scoring_func must be sigmoid"),
        ({"model_type": "mixtral", "scoring_func": "sigmoid"}, "scoring_func must be softmax"),
        ({"model_type": "mixtral", "topk_method": "noaux_tc"}, "topk_method must be greedy"),
        ({"model_type": "glm4_moe", "first_k_dense_replace": -1}, "first_k_dense_replace must"),
        ({"model_type": "glm4_moe", "routed_scaling_factor": 0}, "routed_scaling_factor must be"),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit must be positive"),
        ({"model_type": "gpt_oss", "hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"model_type": "gpt_oss", "num_experts_per_tok": 200}, "through 200 of 128 experts"),
        ({"model_type": "lfm2_moe", "num_dense_layers": -1}, "num_dense_layers must lie in 0"),
        ({"model_type": "lfm2", "hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"model_type": "lfm2_moe", "hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"model_type": "lfm2", "full_attn_idxs": []}, "without attention in any layer"),
        ({"model_type": "lfm2", "full_attn_idxs": ["1"]}, "full_attn_idxs must be a list"),
        ({"model_type": "lfm2", "layer_types": ["conv", "x"]}, "layer_types must name one of"),
        ({"model_type": "lfm2", "conv_L_cache": 1}, "a convolution sees 2 to 64 tokens"),
        (
            {"model_type": "lfm2", "block_ffn_dim_multiplier": 1e30},
            "block_ffn_dim_multiplier makes more than",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "x"]},
            "layer_types must name one of ['linear_attention', 'full_attention']",
        ),
        (
            {"model_type": "qwen3_5_text", "full_attention_interval": 100},
            "a model without attention in any layer is not computed",
        ),
        ({"model_type": "qwen3_5_text", "hidden_act": "gelu"}, "hidden_act must be silu"),
        (
            {"model_type": "qwen3_5_text", "linear_num_value_heads": 17},
            "num_value_heads (17) must be a multiple of num_key_heads (16)",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 65},
            "a convolution sees 2 to 64 tokens",
        ),
        ({"model_type": "lama"}, "llama has a similar name; it runs deepseek_v3, gemma2"),
        ({"model_type": "mistral3", "text_config": [1]}, "text_config must be an object"),
        ({"model_type": "gemma3", "text_config": {"model_type": "t5"}}, "'t5' is not a family"),
        ({"model_type": None}, "model_type None is not a family"),
        ({"model_type": ["llama"]}, "is not a family"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, not '64'"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size must lie in 1"),
        ({"vocab_size": MAX_SIZE + 1}, "vocab_size must lie in 1"),
        ({"num_hidden_layers": 10**15}, "num_hidden_layers must lie in 1..4096"),
        ({"num_attention_heads": 0}, "num_attention_heads must lie in 1"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": 1 << 24}, "at most 4096"),
        ({"head_dim": 0}, "head_dim must lie in 1"),
        ({"head_dim": 10**15}, "head_dim must lie in 1"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; silu, swish, gelu"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
        ({"model_type": "gemma2", "hidden_activation": "x"}, "hidden_activation 'x' is not"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping must be"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "generates no text"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier must be"),
        ({"model_type": "granite", "logits_scaling": "8"}, "logits_scaling must be a number"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must be 1 for each"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, "0"]}, "no_rope_layers must be"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "short_factor must be 4"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": 1.5}, "norm_epsilon must lie in 0"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope_type 'axial' is not supported; default,"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type ['yarn'] is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention: rotations that differ"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1}, "a rope_theta other than 1"),
        ({"rope_scaling": {"rope_type": "yarn", "truncate": 1}}, "truncate must be true or false"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0]}},
            "long_factor must be 4 positive numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}},
            "short_factor must be 4 positive numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0, 0]}},
            "short_factor must be 4 positive numbers",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be positive"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must lie in 1",
        ),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "llama3 scaling needs"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor must turn"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor must turn"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must turn an even number"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_config_that_makes_no_model_is_one_sentence(
    values: dict[str, Any], sentence: str
) -> None:
    config = {"model_type": "llama", **SIZES, **values}
    with pytest.raises(CheckpointError) as caught:
        read_family(config, source="folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json")
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sliding_window": 0}, "a sliding window must be at least 1"),
        ({"sliding_window": "8"}, "sliding_window must be an integer"),
        ({"layer_types": ["full_attention"]}, "layer_types must name one of"),
        ({"layer_types": ["full_attention"] * 2 + ["other"]}, "layer_types must name one of"),
        ({"layer_types": "full_attention"}, "layer_types must name one of"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types must name one of"),
    ],
    ids=str,
)
def test_a_window_that_makes_no_sense_is_one_sentence(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        describe(
            "qwen2",
            **{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0} | values,
        )


def test_a_description_crosses_the_wire_unchanged() -> None:
    spec = describe("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_kind_of_layer_crosses_the_wire_once_however_many_layers_have_it() -> None:
    spec = plain_spec(num_layers=80, windows=(None, 7) * 40)
    assert len(spec.kinds) == 2
    written = spec.to_json()
    assert len(written["kinds"]) == 2
    assert written["layers"] == (0, 1) * 40
    assert len(json.dumps(written)) < 2200


def test_layers_may_differ_in_everything() -> None:
    full = plain_layer(num_heads=4, num_kv_heads=4, ffn_columns=48)
    narrow = plain_layer(num_heads=4, num_kv_heads=2, head_size=16, window=5, ffn_columns=12)
    spec = spec_of([full, narrow, full])
    assert (spec.kinds, spec.layers) == ((full, narrow), (0, 1, 0))
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    shapes = tensor_shapes(spec)
    assert shapes["layers.0.key.weight"] == (32, 24)
    assert shapes["layers.1.key.weight"] == (32, 24)
    assert shapes["layers.1.query.weight"] == (64, 24)
    assert shapes["layers.1.down.weight"] == (24, 12)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, a, f: m.update(extra=1),
        lambda m, a, f: m.update(hidden_size=64.0),
        lambda m, a, f: m.update(hidden_size=-1),
        lambda m, a, f: m.update(layers=[0] * 5000),
        lambda m, a, f: m.update(layers=None),
        lambda m, a, f: m.update(layers=[0, 1, 0]),
        lambda m, a, f: m.update(layers=[0, True, 0]),
        lambda m, a, f: m.update(layers=[]),
        lambda m, a, f: m.update(layers=[[0], 0, 0]),
        lambda m, a, f: m.update(kinds=[]),
        lambda m, a, f: m.update(kinds=m["kinds"] * 2, layers=[0, 1, 0]),
        lambda m, a, f: m.update(kinds=m["kinds"] * 100),
        lambda m, a, f: m.update(kinds=[None]),
        lambda m, a, f: m.update(norm_epsilon="none"),
        lambda m, a, f: m.update(norm_epsilon=10**400),
        lambda m, a, f: m.update(tied_embeddings="yes"),
        lambda m, a, f: a.update(kind="convolution"),
        lambda m, a, f: a.update(kind=["attention"]),
        lambda m, a, f: a.update(kind="gated_mlp"),
        lambda m, a, f: a.pop("kind"),
        lambda m, a, f: a.update(extra=1),
        lambda m, a, f: a.update(num_heads=10**9),
        lambda m, a, f: a.update(num_kv_heads=3),
        lambda m, a, f: a.update(window=0),
        lambda m, a, f: a.update(window="8"),
        lambda m, a, f: a.update(qkv_bias=1),
        lambda m, a, f: a["rotary"].update(inverse_frequencies=["x", "y", "z", "w"]),
        lambda m, a, f: a["rotary"].update(inverse_frequencies=[1.0] * 5),
        lambda m, a, f: a["rotary"].update(inverse_frequencies="1234"),
        lambda m, a, f: a["rotary"].update(inverse_frequencies=["1", "1", "1", "1"]),
        lambda m, a, f: a["rotary"].update(inverse_frequencies=[1.0, 1.0, True, 1.0]),
        lambda m, a, f: a["rotary"].update(inverse_frequencies=[1.0, 1.0, float("nan"), 1.0]),
        lambda m, a, f: a["rotary"].update(long_inverse_frequencies=[1.0]),
        lambda m, a, f: a["rotary"].update(trained_tokens=-1),
        lambda m, a, f: a["rotary"].update(scale=0),
        lambda m, a, f: a["rotary"].update(scale=None),
        lambda m, a, f: a["rotary"].update(is_interleaved=1),
        lambda m, a, f: a["rotary"].pop("scale"),
        lambda m, a, f: a.update(rotary=None),
        lambda m, a, f: a.update(rotary=[1.0] * 4),
        lambda m, a, f: m.update(norm_epsilon="1e-5"),
        lambda m, a, f: m.update(family=[[]]),
        lambda m, a, f: m.update(family="f" * 1000),
        lambda m, a, f: m.update(layers=[0] * 4096) or a.update(num_heads=64, num_kv_heads=64),
        lambda m, a, f: f.update(columns=0),
        lambda m, a, f: f.update(activation="relu"),
        lambda m, a, f: f.update(activation=["silu"]),
        lambda m, a, f: f.update(has_post_norm=None),
        lambda m, a, f: a.update(has_norm=1),
        lambda m, a, f: a.update(score_scale=0),
        lambda m, a, f: a.update(soft_cap="2"),
        lambda m, a, f: a.update(soft_cap=-1.0),
        lambda m, a, f: m.update(embedding_scale=None),
        lambda m, a, f: m.update(logit_scale=float("nan")),
        lambda m, a, f: m.update(logit_soft_cap=0.0),
        lambda m, a, f: f.update(bias=None),
    ],
)
def test_a_damaged_description_is_a_value_error(change: Callable[..., object]) -> None:
    written = json.loads(json.dumps(describe().to_json()))
    change(written, written["kinds"][0]["mixer"], written["kinds"][0]["feed_forward"])
    with pytest.raises(ValueError, match=r"."):
        ModelSpec.from_json(written)


def test_a_description_without_a_field_is_a_value_error() -> None:
    whole = describe().to_json()
    for name in whole:
        with pytest.raises(ValueError, match="other fields"):
            ModelSpec.from_json({key: value for key, value in whole.items() if key != name})
