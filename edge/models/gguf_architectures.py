"""The architectures of GGUF files: their keys and the names of their tensors.

Names are those of `general.architecture`. Facts that llama.cpp knows without a key are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

_MODEL_ROLES = {"embedding": EMBEDDING, "final_norm": "output_norm.weight", "head": HEAD}

_LAYER_ROLES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "sinks": "attn_sinks.weight",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
    "router_correction": "exp_probs_b.bias",
    "shared_gate": "ffn_gate_inp_shexp",
    "linear_query": "attn_qkv.query",
    "linear_key": "attn_qkv.key",
    "linear_value": "attn_qkv.value",
    "linear_gate": "attn_gate",
    "linear_decay": "ssm_alpha",
    "linear_beta": "ssm_beta",
    "linear_output": "ssm_out",
    "linear_convolution": "ssm_conv1d.weight",
    "linear_decay_bias": "ssm_dt.bias",
    "linear_decay_rate": "ssm_a",
    "linear_scale": "ssm_norm.weight",
    "short_before": "shortconv.before",
    "short_after": "shortconv.after",
    "short_value": "shortconv.value",
    "short_output": "shortconv.out_proj",
    "short_convolution": "shortconv.conv.weight",
    "attention_norm": "attn_norm.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
}

STACKED_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "ffn_gate_exps": ("gate",),
    "ffn_up_exps": ("up",),
    "ffn_gate_up_exps": ("gate", "up"),
    "ffn_down_exps": ("down",),
}
"""The tensors with the matrices or biases of all experts of a layer, by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The facts of a value of `general.architecture`.

    interleaves: rows of query and key are permuted for llama.cpp's rotation of neighbours.
    model_type: of config.json, if it differs.
    keys: of further fields; those in `needed` are in every file. plain: supported values of further
    keys, the default first. by_layer: fields with a number for each layer.
    roles: names of tensors that differ from the usual ones, or are additional. fused: as of a
    Family, by the name of a tensor in its layer.
    has_window: whether there is a sliding window, in layers that the family knows.
    tiles_values: value heads of linear attention are in llama.cpp's order (see
    `edge/weights/gguf/linear.py`).
    may_lack: optional fields that are required elsewhere.
    finish: adds values to the config.json that llama.cpp knows without a key, or that follow from
    the present tensors. Raises ValueError.
    """

    interleaves: bool = False
    model_type: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    by_layer: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_window: bool = False
    tiles_values: bool = False
    may_lack: tuple[str, ...] = ()
    finish: Callable[[dict[str, Any], Mapping[str, tuple[int, ...]]], None] = (
        lambda _values, _shapes: None
    )

    def tensor_name(self, role: str) -> str:
        """The name of a role's tensor; for a part of a fused tensor, a made-up name."""
        if not role.startswith("layers."):
            return self.roles.get(role) or _MODEL_ROLES[role]
        _layers, index, part, *suffix = role.split(".")
        if part == "experts":  # older files have a tensor per expert
            number, matrix, kind = suffix
            return ".".join(["blk", index, _LAYER_ROLES[matrix], number, kind])
        if part == "shared":
            matrix, kind = suffix
            usual = f"{_LAYER_ROLES[matrix]}_shexp"
            return ".".join(["blk", index, self.roles.get(f"shared.{matrix}", usual), kind])
        for fused, parts in self.fused.items():
            if part in parts:
                return ".".join(["blk", index, fused, part, *suffix])
        return ".".join(["blk", index, self.roles.get(part) or _LAYER_ROLES[part], *suffix])


def _gemma(large: int) -> Callable[[dict[str, Any], Mapping[str, tuple[int, ...]]], None]:
    """large: the number of layers of the size with another scale of scores."""

    def finish(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        size = values.get("head_dim")
        if values["num_hidden_layers"] == large and type(hidden) is type(heads) is int and heads:
            size = hidden // heads
        values["query_pre_attn_scalar"] = size
        # With two kinds of rotations, only layers without a window are scaled.
        values["rope_scaling"] = values.pop("rope_parameters")

    return finish


def _gemma4(values: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Gemma 4's layers, which differ in windows, rotations, heads and columns."""
    count, is_local = values["num_hidden_layers"], values.pop("is_local")
    values["layer_types"] = ["sliding_attention" if each else "full_attention" for each in is_local]
    columns, shared = values.pop("columns_of_layers"), values.get("num_kv_shared_layers", 0)
    first = values["intermediate_size"] = columns[0] if columns else 0
    if type(shared) is not int or not 0 <= shared < max(count, 1):
        raise ValueError(f"{shown(shared)} of {count} layers share keys; download the file again")
    is_wide = values["use_double_wide_mlp"] = bool(shared) and columns[-1] == 2 * first
    if columns != [first] * (count - shared) + [first * (1 + is_wide)] * shared:
        raise ValueError(f"layers with {shown(columns)} columns are not computed here")
    own = range(count - shared)
    values["attention_k_eq_v"] = any(
        not is_local[each] and f"blk.{each}.attn_v.weight" not in shapes for each in own
    )
    for name, is_there in (("num_key_value_heads", 1), ("num_global_key_value_heads", 0)):
        heads = {
            each
            for each, local in zip(values["kv_heads_of_layers"], is_local, strict=True)
            if bool(local) == bool(is_there)
        }
        if len(heads) > 1:
            raise ValueError(f"layers alike but for {shown(heads)} KV heads are not computed here")
        values[name] = next(iter(heads), None)
    del values["kv_heads_of_layers"]
    both = values["num_key_value_heads"], values["num_global_key_value_heads"]
    if both[0] is None:
        values["num_key_value_heads"] = both[1]
    elif both[1] not in (None, both[0]) and not values["attention_k_eq_v"]:
        raise ValueError(f"layers with {both[0]} and {both[1]} KV heads are not computed here")
    size = values["head_dim"]
    for name in ("values_of_local", "turned_of_local"):
        if values.pop(name, size) != size:
            raise ValueError(f"heads of {shown(size)} elements and others are not computed here")
    values["vocab_size_per_layer_input"] = values["vocab_size"]
    values["enable_moe_block"] = bool(values.get("num_experts"))
    if not values["hidden_size_per_layer_input"]:  # of the large sizes
        values["use_bidirectional_attention"] = "vision"
    rope, local = values["rope_parameters"], values.pop("local_rope_theta", 10_000.0)
    factors = rope.get("factors")
    if rope.get("rope_type") == "factors" and set(factors) <= {1.0, max(factors)}:
        # Converters write partial rotation this way.
        rope = {
            "rope_type": "proportional",
            "partial_rotary_factor": factors.count(1.0) / len(factors),
        }
    values["rope_parameters"] = {
        "full_attention": {"rope_type": "default", **rope, "rope_theta": values.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _olmo(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
    """OLMo 3 is OLMo 2 with windows."""
    if values["sliding_window"]:
        values["model_type"] = "olmo3"
        values["rope_scaling"] = values.pop("rope_parameters")


def _llama(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Mistral is Llama with a window, and Mixtral Mistral with experts."""
    if values.get("num_local_experts"):
        values["model_type"] = "mixtral"
    elif values["sliding_window"]:
        values["model_type"] = "mistral"


def _ministral(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
    values["rope_parameters"]["llama_4_scaling_beta"] = values.pop("query_growth", 0.0)


def _gpt_oss(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
    if values["rope_parameters"].get("rope_type") == "yarn":
        values["rope_parameters"]["truncate"] = False


def _glm4_moe(values: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in shapes


def _lfm2(values: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """LFM2's layers; those without KV heads are convolutions."""
    heads = values.pop("kv_heads_of_layers")
    different = sorted({each for each in heads if each})
    if len(different) != 1:
        raise ValueError(
            f"layers with {shown(different)} KV heads are not computed here, use another model"
        )
    (values["num_key_value_heads"],) = different
    values["layer_types"] = ["full_attention" if each else "conv" for each in heads]
    values["block_auto_adjust_ff_dim"] = False
    values["conv_bias"] = False
    values["norm_eps"] = values["rms_norm_eps"]
    values["tie_embedding"] = values["tie_word_embeddings"]
    values["use_expert_bias"] = any("exp_probs_b" in name for name in shapes)


def _normed(is_normed: bool) -> Callable[[dict[str, Any], Mapping[str, tuple[int, ...]]], None]:
    """Whether the chosen experts' weights are renormalized."""

    def finish(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
        values["norm_topk_prob"] = is_normed

    return finish


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GATE_UP = {"ffn_up": ("gate", "up")}

_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_SOFTMAX: Mapping[str, tuple[object, ...]] = {
    "expert_gating_func": (1, 0),
    "expert_weights_scale": (1.0, 0.0),
    "expert_group_count": (1, 0),
}
_DEEP = {"picture_layers": "n_deepstack_layers"}
_SIGMOID: Mapping[str, tuple[object, ...]] = {"expert_gating_func": (2,)}


def _delta(values: dict[str, Any], _shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The number of value heads follows from their total size."""
    whole, heads = values.pop("linear_values"), values["linear_num_value_heads"]
    if type(whole) is not int or type(heads) is not int or heads < 1 or whole % heads:
        raise ValueError(
            f"values of linear attention of {shown(whole)} elements in {shown(heads)} heads; "
            "download the file again"
        )
    values["linear_value_head_dim"] = whole // heads
    if "moe_intermediate_size" in values:
        values["norm_topk_prob"] = True
        values.setdefault("intermediate_size", values["moe_intermediate_size"])


_DELTA: Mapping[str, Any] = {
    "keys": {"full_attention_interval": "full_attention_interval"},
    "needed": {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_values": "ssm.inner_size",
    },
    "roles": {"mlp_norm": "post_attention_norm.weight"},
    "finish": _delta,
}
_DELTA_EXPERTS: Mapping[str, Any] = {
    **_DELTA,
    "needed": {
        **_DELTA["needed"],
        **_EXPERTS,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    "plain": {**_SOFTMAX, "expert_weights_norm": (True,)},
    "may_lack": ("intermediate_size",),
}

_LFM2: Mapping[str, Any] = {
    "needed": {"conv_L_cache": "shortconv.l_cache"},
    "by_layer": {"kv_heads_of_layers": "attention.head_count_kv"},
    "roles": {"final_norm": "token_embd_norm.weight"},
    "fused": {"shortconv.in_proj": ("short_before", "short_after", "short_value")},
    "finish": _lfm2,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma2": Architecture(keys=_CAPS, has_window=True, finish=_gemma(46)),
    "gemma3": Architecture(
        model_type="gemma3_text",
        keys={**_CAPS, "rope_local_base_freq": "rope.freq_base_swa"},
        has_window=True,
        finish=_gemma(62),
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "head_dim": "attention.key_length_swa",
            "local_rope_theta": "rope.freq_base_swa",
            "values_of_local": "attention.value_length_swa",
            "turned_of_local": "rope.dimension_count_swa",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        needed={
            "global_head_dim": "attention.key_length",
            "head_dim": "attention.key_length_swa",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "rope_theta": "rope.freq_base",
        },
        by_layer={
            "columns_of_layers": "feed_forward_length",
            "kv_heads_of_layers": "attention.head_count_kv",
            "is_local": "attention.sliding_window_pattern",
        },
        roles={
            "token_table": "per_layer_token_embd.weight",
            "token_projection": "per_layer_model_proj.weight",
            "token_norm": "per_layer_proj_norm.weight",
            "token_gate": "inp_gate",
            "token_output": "proj",
            "token_post_norm": "post_norm.weight",
            "layer_scale": "layer_output_scale.weight",
            "router_norm": "ffn_gate_inp.scale",
            "expert_scales": "ffn_down_exps.scale",
            "experts_norm": "pre_ffw_norm_2.weight",
            "shared_post_norm": "post_ffw_norm_1.weight",
            "experts_post_norm": "post_ffw_norm_2.weight",
            **{f"shared.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
        },
        has_window=True,
        finish=_gemma4,
    ),
    "glm4": Architecture(fused=_GATE_UP),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        keys={
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        needed={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        plain=_SIGMOID,
        roles={"mlp_norm": "post_attention_norm.weight"},
        finish=_glm4_moe,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        needed={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        roles={"mlp_norm": "post_attention_norm.weight"},
        has_window=True,
        finish=_gpt_oss,
    ),
    "granite": Architecture(
        interleaves=True,
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "lfm2": Architecture(**_LFM2),
    "lfm2moe": Architecture(
        **{
            **_LFM2,
            "model_type": "lfm2_moe",
            "needed": {
                **_LFM2["needed"],
                **_EXPERTS,
                "num_dense_layers": "leading_dense_block_count",
            },
            "plain": {**_SIGMOID, "expert_weights_scale": (1.0, 0.0)},
        }
    ),
    "llama": Architecture(
        interleaves=True,
        keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        plain=_SOFTMAX,
        has_window=True,
        finish=_llama,
    ),
    "mistral3": Architecture(
        interleaves=True,
        model_type="ministral3",
        keys={"query_growth": "attention.temperature_scale"},
        has_window=True,
        finish=_ministral,
    ),
    "olmo2": Architecture(has_window=True, finish=_olmo),
    "phi3": Architecture(
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        fused={"attn_qkv": ("query", "key", "value"), **_GATE_UP},
        has_window=True,
    ),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        needed={
            **_EXPERTS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        plain={**_SOFTMAX, "expert_weights_norm": (False,)},
        finish=_normed(False),
    ),
    "qwen2vl": Architecture(model_type="qwen2"),
    "qwen3": Architecture(),
    "qwen35": Architecture(**_DELTA, model_type="qwen3_5_text", tiles_values=True),
    "qwen35moe": Architecture(**_DELTA_EXPERTS, model_type="qwen3_5_moe_text", tiles_values=True),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        needed=_EXPERTS,
        plain={**_SOFTMAX, "expert_weights_norm": (True,)},
        finish=_normed(True),
    ),
    "qwen3next": Architecture(**_DELTA_EXPERTS, model_type="qwen3_next"),
    "qwen3vl": Architecture(model_type="qwen3", keys=_DEEP),
    "qwen3vlmoe": Architecture(
        model_type="qwen3_moe",
        keys=_DEEP,
        needed=_EXPERTS,
        plain={**_SOFTMAX, "expert_weights_norm": (True,)},
        finish=_normed(True),
    ),
    "smollm3": Architecture(interleaves=True),
}
"""Mistral's models before Ministral 3, and Mixtral's, are of architecture "llama"."""
