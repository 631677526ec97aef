"""Gemma 4: Gemma 3 with a different head size in layers of full attention, and a scale per layer.

The small sizes (E2B, E4B) have inputs per layer and token, and later layers share the keys and
values of earlier ones. Some large sizes have experts beside the feed-forward block of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown

from edge.models.attention import Attention
from edge.models.config import Config
from edge.models.decoder import (
    GLOBAL,
    LOCAL,
    activation,
    decoder,
    head_size_of,
    layer_kinds,
    num_layers,
)
from edge.models.experts import MAX_EXPERTS, Experts, SharedExpert
from edge.models.families import READS_PICTURES, Family
from edge.models.gated_mlp import GatedMlp
from edge.models.gemma import HEAD_SIZE, USUAL, gemma_facts, gemma_tensor_name
from edge.models.rope import read_rotary
from edge.models.spec import FeedForward, ModelSpec

_PATTERN = 6
"""The interval of layers with full attention."""
_GLOBAL_HEAD_SIZE = 512
_ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_OF_LAYERS = ("head_dim", "num_key_value_heads")
"""The fields that layers may have of their own."""


def describe(config: Config) -> ModelSpec:
    config = config.filled({**USUAL, "num_hidden_layers": 30, "vocab_size": 262_144})
    _check(config)
    count = num_layers(config)
    usual = [LOCAL if (number + 1) % _PATTERN else GLOBAL for number in range(count)]
    kinds = [*layer_kinds(config, usual=usual)]
    kinds[-1] = GLOBAL  # always, regardless of the file
    if not config.mapping("rope_parameters"):
        config = config.changed(rope_parameters=_ROPE)
    facts = gemma_facts(config, context_tokens=131_072, caps=(None, None))
    mixers: dict[tuple[str, int, int], Attention] = {}
    of_layers = []
    first_shared = _first_shared(config, kinds)
    for number, kind in enumerate(kinds):
        own = (kind, *_heads(config, number, kind))
        if own not in mixers:
            mixers[own] = _attention(config, *own)
        mixer = mixers[own]
        if number >= first_shared:
            last = max(each for each in range(first_shared) if kinds[each] == kind)
            mixer = replace(mixer, keys_of=last)
        of_layers.append(mixer)
    facts["feed_forward"] |= {"has_scale": True, "token_inputs": _token_inputs(config)}
    if config.flag("enable_moe_block", False):
        blocks: list[FeedForward | None] = [_experts(config)] * count
    else:
        is_wide = config.flag("use_double_wide_mlp", False)
        columns = config.size("intermediate_size")
        wide = GatedMlp(columns=2 * columns, bias=False, **facts["feed_forward"])
        blocks = [wide if is_wide and each >= first_shared else None for each in range(count)]
    return decoder(
        config,
        family="gemma4_text",
        rotaries=[each.rotary for each in of_layers],
        mixers=of_layers,
        feed_forwards=blocks,
        **facts,
    )


def _attention(config: Config, kind: str, head_size: int, num_kv_heads: int) -> Attention:
    has_bias = config.flag("attention_bias", False)
    part = Attention(
        num_heads=config.size("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rotary=read_rotary(config, head_size, layer_type=kind),
        window=None,
        qkv_bias=has_bias,
        output_bias=has_bias,
        query_key_norm=True,
        value_norm=True,
        score_scale=1.0,
        has_post_norm=True,
    )
    if kind == GLOBAL:
        return replace(part, keys_are_values=config.flag("attention_k_eq_v", False))
    return replace(
        part,
        window=config.integer("sliding_window", 512),
        sees_pictures=config.values.get("use_bidirectional_attention") == "vision"
        and config.flag(READS_PICTURES, False),
    )


def _experts(config: Config) -> Experts:
    return Experts(
        num_experts=config.size("num_experts", most=MAX_EXPERTS),
        top_k=config.size("top_k_experts", most=MAX_EXPERTS),
        columns=config.size("moe_intermediate_size"),
        activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        renormalized=True,
        shared=SharedExpert(columns=config.size("intermediate_size"), is_gated=False),
        is_apart=True,
        has_post_norm=True,
        has_scale=True,
    )


def _heads(config: Config, number: int, kind: str) -> tuple[int, int]:
    """The head size of a layer, and its number of KV heads."""
    size, kv_heads = head_size_of(config, HEAD_SIZE), config.size("num_key_value_heads")
    if "per_layer_config" not in config.values:
        if kind == LOCAL:
            return size, kv_heads
        if config.flag("attention_k_eq_v", False):
            kv_heads = config.size("num_global_key_value_heads", kv_heads)
        return config.size("global_head_dim", _GLOBAL_HEAD_SIZE), kv_heads
    found = config.mapping("per_layer_config").get(str(number), {})
    if not isinstance(found, Mapping) or not set(found) <= set(_OF_LAYERS):
        raise config.error(
            f"per_layer_config must have {' and '.join(_OF_LAYERS)} of layer {number}, "
            f"not {shown(found)}"
        )
    own = Config(found, source=f"{config.source}: per_layer_config.{number}")
    return own.size("head_dim", size), own.size("num_key_value_heads", kv_heads)


def _token_inputs(config: Config) -> int | None:
    """The size of the inputs per layer; by default E2B and E4B have them."""
    if config.integer("hidden_size_per_layer_input", 256) == 0:
        return None
    if config.flag("enable_moe_block", False):
        raise config.error("hidden_size_per_layer_input: layers with experts have no such inputs")
    tokens = config.size("vocab_size")
    if config.size("vocab_size_per_layer_input", 262_144) != tokens:
        raise config.error(
            f"vocab_size_per_layer_input must be vocab_size ({tokens}): each token has inputs"
        )
    return config.size("hidden_size_per_layer_input", 256)


def _first_shared(config: Config, kinds: Sequence[str]) -> int:
    """The first layer that shares keys and values: of the last earlier layer of its kind with its
    own."""
    shared = config.values.get("num_kv_shared_layers")
    count = config.integer("num_kv_shared_layers", 0) if shared else 0
    first = len(kinds) - count
    if first < 0 or not set(kinds[first:]) <= set(kinds[:first]):
        raise config.error(
            f"num_kv_shared_layers: {count} of {len(kinds)} layers share keys and values of layers "
            "before them, of which there must be one of each kind"
        )
    return first


def _check(config: Config) -> None:
    if config.values.get("use_bidirectional_attention") == "all":
        raise config.error("use_bidirectional_attention: such a model generates no text")


_OF_MODEL = {
    "token_table": "model.embed_tokens_per_layer.weight",
    "token_projection": "model.per_layer_model_projection.weight",
    "token_norm": "model.per_layer_projection_norm.weight",
}
_OF_TOKENS = {
    "token_gate": "per_layer_input_gate",
    "token_output": "per_layer_projection",
    "token_post_norm": "post_per_layer_input_norm.weight",
}
_OF_EXPERTS = {
    "router": "router.proj",
    "router_norm": "router.scale",
    "expert_scales": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "shared_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
}


def tensor_name(role: str) -> str:
    if not role.startswith("layers."):
        return _OF_MODEL.get(role) or gemma_tensor_name(role)
    layers, number, part, *rest = role.split(".")
    if part in _OF_EXPERTS:
        return ".".join(["model.layers", number, _OF_EXPERTS[part], *rest])
    if part in _OF_TOKENS:
        return ".".join(["model.layers", number, _OF_TOKENS[part], *rest])
    if part == "shared":  # the block of the sizes without experts
        return gemma_tensor_name(".".join([layers, number, *rest]))
    return gemma_tensor_name(role).replace(".mlp.experts.", ".experts.")


FAMILY = Family(
    describe=describe,
    tensor_name=tensor_name,
    stacked_experts={"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)},
)
