"""gpt-oss: experts with biases, clamped; attention with sinks, and windows in every other layer."""

from __future__ import annotations

from edge.kernels.gated_mlp.reference import Clamp
from edge.models.config import Config
from edge.models.decoder import (
    GLOBAL,
    LOCAL,
    activation,
    decoder,
    head_size_of,
    layer_kinds,
    layer_windows,
    num_layers,
)
from edge.models.experts import MAX_EXPERTS, Experts
from edge.models.families import Family, llama_tensor_name
from edge.models.rope import read_rotary
from edge.models.spec import ModelSpec

_HEAD_SIZE = 64
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe(config: Config) -> ModelSpec:
    config = config.filled({"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5})
    if not config.mapping("rope_parameters") and not config.mapping("rope_scaling"):
        config = config.changed(rope_scaling=_YARN)
    count, head_size = num_layers(config), head_size_of(config, _HEAD_SIZE)
    usual = [GLOBAL if number % 2 else LOCAL for number in range(count)]
    has_bias = config.flag("attention_bias", True)
    return decoder(
        config,
        family="gpt_oss",
        head_size=_HEAD_SIZE,
        windows=layer_windows(config, layer_kinds(config, usual=usual), usual=128),
        rotaries=(read_rotary(config, head_size, theta=150_000.0),) * count,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=False,
        mixer={"has_sinks": True},
        feed_forwards=(_experts(config),) * count,
    )


def _experts(config: Config) -> Experts:
    if activation(config) != "silu":
        raise config.error("hidden_act must be silu: the experts of this family have no other")
    return Experts(
        num_experts=config.size("num_local_experts", 128, most=MAX_EXPERTS),
        top_k=config.size("num_experts_per_tok", 4, most=MAX_EXPERTS),
        columns=config.size("intermediate_size"),
        activation="silu",
        renormalized=True,  # a softmax over those that are chosen is that over all, divided
        bias=True,
        clamp=Clamp(
            limit=config.positive("swiglu_limit", 7.0), slope=config.positive("swiglu_alpha", 1.702)
        ),
    )


def tensor_name(role: str) -> str:
    return llama_tensor_name(role).replace(".mlp.gate.", ".mlp.router.")


FAMILY = Family(
    describe=describe,
    tensor_name=tensor_name,
    turned_experts={
        "mlp.experts.gate_up_proj": ("gate.weight", "up.weight"),
        "mlp.experts.gate_up_proj_bias": ("gate.bias", "up.bias"),
        "mlp.experts.down_proj": ("down.weight",),
        "mlp.experts.down_proj_bias": ("down.bias",),
    },
)
