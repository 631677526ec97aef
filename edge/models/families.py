"""The model families that Edge runs: the mapping of `config.json` and tensor names to data."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from edge.errors import CheckpointError
from edge.models.config import Config
from edge.models.spec import ModelSpec

FAMILIES = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_oss",
    "granite",
    "lfm2",
    "lfm2_moe",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
)
"""The families: modules of this package with the name of `model_type` in `config.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family: describe(config) → ModelSpec; tensor_name(role) → the name in the checkpoint.

    norm_offset: added to the weights of norms. fused: matrices of a layer that hold several roles,
    one under the other, by their names behind the layer's number; a checkpoint has them, or each
    role by its own name. fused_by_head: the same for linear attention, with rows grouped by key
    head. stacked_experts: the same for experts, in tensors [experts, rows, columns].
    turned_experts: the same in tensors [experts, columns, rows], where rows of several roles,
    weights or biases, alternate. turned: like fused, for matrices [columns, rows].
    further_name(spec, role) → the name of a weight of the further head, if checkpoints have one.
    """

    describe: Callable[[Config], ModelSpec]
    tensor_name: Callable[[str], str]
    norm_offset: float = 0.0
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_by_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turned_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    further_name: Callable[[ModelSpec, str], str] | None = None


WITH_PICTURES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "idefics3": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama",
}
"""Multimodal models by `model_type`, with the default type of their text part."""


_USUALLY_DEEP: Mapping[str, list[int]] = {
    "qwen3_vl": [8, 16, 24],
    "qwen3_5": [],
    "qwen3_5_moe": [],
}


def reads_pictures(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a multimodal model, whose text part is a model of its own."""
    name = values.get("model_type")
    return isinstance(name, str) and name in WITH_PICTURES


def deep_layers(values: Mapping[str, Any]) -> Any:
    """The layers of the vision encoder whose outputs go to the model's first layers: a list that is
    not checked."""
    name, vision = values.get("model_type"), values.get("vision_config")
    if not isinstance(name, str) or name not in _USUALLY_DEEP or not isinstance(vision, Mapping):
        return []
    found = vision.get("deepstack_visual_indexes")
    return _USUALLY_DEEP[name] if found is None else found


def text_part(values: Mapping[str, Any], *, source: str) -> Mapping[str, Any]:
    """The values of a config.json; of a multimodal model, those of its text part."""
    if not reads_pictures(values):
        return values
    usual_kind = WITH_PICTURES[values["model_type"]]
    text = Config(values, source=source).mapping("text_config")
    if not text and values["model_type"] == "qwen2_5_vl":  # older files have its values outside
        text = {**values, "model_type": usual_kind}
    rope = text.get("rope_scaling")
    if isinstance(rope, Mapping) and rope.get("type") == "mrope":  # rotation of text is ordinary
        text = {**text, "rope_scaling": {**rope, "type": "default", "rope_type": "default"}}
    kind = text.get("model_type", usual_kind)
    family, usual = _TEXT_PARTS.get(kind, (kind, {})) if isinstance(kind, str) else (kind, {})
    deep = deep_layers(values)
    return {
        **usual,
        **text,
        "model_type": family,
        READS_PICTURES: True,
        PICTURE_LAYERS: len(deep) if isinstance(deep, list) else 0,
    }


READS_PICTURES = "reads_pictures"
"""A field beside those of a text part: it belongs to a multimodal model."""
PICTURE_LAYERS = "picture_layers"
"""The same: the field of ModelSpec."""

_USUAL_MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_USUAL_QWEN = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
_TEXT_PARTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mistral": ("mistral", _USUAL_MISTRAL),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", _USUAL_QWEN),
}
"""The family of a text part, and default values that nested configurations leave out, by its
type."""


_MISSING = {
    "apertus": ("llama", "an activation with weights of its own"),
    "cohere": ("llama", "LayerNorm and parts side by side"),
    "cohere2": ("llama", "LayerNorm and parts side by side"),
    "deepseek_v2": ("deepseek_v3", "experts that are chosen by softmax"),
    "deepseek_v32": ("deepseek_v3", "attention to tokens that an indexer picks"),
    "falcon": ("llama", "LayerNorm and parts side by side"),
    "gemma": ("gemma2", "layers of two norms"),
    "gemma3n": ("gemma3_text", "embeddings for each layer"),
    "granitemoe": ("granite", "experts"),
    "olmo": ("llama", "norms without weights"),
    "phi": ("phi3", "LayerNorm and parts side by side"),
    "phimoe": ("phi3", "experts"),
    "stablelm": ("llama", "LayerNorm"),
    "starcoder2": ("gpt2", "rotary positions"),
}
"""Families that do not run here: the nearest one that does, and the part that it lacks."""


def unknown_family(name: object) -> str:
    """The error sentence for a model of an unknown family."""
    sentence = f"model_type {shown(name)} is not a family Edge runs"
    known = (*FAMILIES, *WITH_PICTURES)
    if isinstance(name, str):
        near, missing = _MISSING.get(name, ("", ""))
        if near:
            sentence += f": the nearest is {near}, which lacks {missing}"
        elif alike := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            sentence += f"; {alike[0]} has a similar name"
    return f"{sentence}; it runs {', '.join(sorted(known))}"


def read_family(
    values: Mapping[str, Any], *, source: str, names: Mapping[str, str] | None = None
) -> tuple[Family, ModelSpec]:
    """The family and the model of a configuration.

    names: the fields' names in the original file, if that is not a config.json. Raises
    CheckpointError for an unknown family or invalid values.
    """
    values = text_part(values, source=source)
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{source}: {unknown_family(name)}")
    family: Family = importlib.import_module(f"edge.models.{name}").FAMILY
    config = Config(values, source=source, names=names)
    try:
        return family, family.describe(config)
    except ValueError as error:
        raise config.error(str(error)) from error
    except ArithmeticError as error:  # a result of finite numbers may overflow
        raise config.error("it has numbers that nothing can be computed with") from error


_LAYER_ROLES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "router": "mlp.gate",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_expert_gate",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "sinks": "self_attn.sinks",
    "attention_norm": "input_layernorm.weight",
    "attention_post_norm": "post_self_attn_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
    "layer_scale": "layer_scalar",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "short_before": "conv.before_proj",
    "short_after": "conv.after_proj",
    "short_value": "conv.value_proj",
    "short_output": "conv.out_proj",
    "short_convolution": "conv.conv.weight",
    "short_convolution_bias": "conv.conv.bias",
    "linear_query": "linear_attn.in_proj_q",
    "linear_key": "linear_attn.in_proj_k",
    "linear_value": "linear_attn.in_proj_v",
    "linear_gate": "linear_attn.in_proj_z",
    "linear_decay": "linear_attn.in_proj_a",
    "linear_beta": "linear_attn.in_proj_b",
    "linear_output": "linear_attn.out_proj",
    "linear_convolution": "linear_attn.conv1d.weight",
    "linear_decay_bias": "linear_attn.dt_bias",
    "linear_decay_rate": "linear_attn.A_log",
    "linear_scale": "linear_attn.norm.weight",
}

_MODEL_ROLES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def llama_tensor_name(role: str) -> str:
    """The tensor names of Llama checkpoints, and of most later families."""
    if role in _MODEL_ROLES:
        return _MODEL_ROLES[role]
    _layers, index, part, *suffix = role.split(".")
    if part in ("experts", "shared"):
        *number, matrix, last = suffix
        block = ["mlp.experts", *number] if number else ["mlp.shared_expert"]
        name = _LAYER_ROLES[matrix].removeprefix("mlp.")
        return ".".join(["model.layers", index, *block, name, last])
    return ".".join(["model.layers", index, _LAYER_ROLES[part], *suffix])
