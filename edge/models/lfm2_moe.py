"""LFM2 with experts in all layers but the first."""

from __future__ import annotations

from edge.models import lfm2
from edge.models.config import Config
from edge.models.decoder import num_layers
from edge.models.experts import MAX_EXPERTS, Experts
from edge.models.families import Family
from edge.models.spec import MAX_LAYERS, ModelSpec

_USUAL = {"max_position_embeddings": 128_000, "num_key_value_heads": 8, "intermediate_size": 7168}
_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}


def describe(config: Config) -> ModelSpec:
    config = config.filled(_USUAL)
    first = config.integer("num_dense_layers", 2)
    if not 0 <= first <= MAX_LAYERS:
        raise config.error(f"num_dense_layers must lie in 0..{MAX_LAYERS}, not {first}")
    experts = Experts(
        num_experts=config.size("num_experts", 32, most=MAX_EXPERTS),
        top_k=config.size("num_experts_per_tok", 4, most=MAX_EXPERTS),
        columns=config.size("moe_intermediate_size", 1792),
        activation="silu",
        renormalized=config.flag("norm_topk_prob", True),
        scoring="sigmoid",
        has_correction=config.flag("use_expert_bias", True),
        weight_scale=config.positive("routed_scaling_factor", 1.0),
        least_sum=1e-6,
    )
    return lfm2.convolution_decoder(
        config,
        family="lfm2_moe",
        columns=config.size("intermediate_size"),
        feed_forwards=[None if n < first else experts for n in range(num_layers(config))],
    )


def tensor_name(role: str) -> str:
    match role.split("."):
        case ["layers", index, "router", suffix]:
            return f"model.layers.{index}.feed_forward.gate.{suffix}"
        case ["layers", index, "router_correction"]:
            return f"model.layers.{index}.feed_forward.expert_bias"
        case ["layers", index, "experts", number, part, suffix]:
            return f"model.layers.{index}.feed_forward.experts.{number}.{_MATRICES[part]}.{suffix}"
    return lfm2.tensor_name(role)


FAMILY = Family(describe=describe, tensor_name=tensor_name, fused=lfm2.FAMILY.fused)
