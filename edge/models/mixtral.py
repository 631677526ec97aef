"""Mixtral: Mistral with experts in place of every feed-forward block."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import activation, decoder, num_layers, one_window
from edge.models.experts import MAX_EXPERTS, Experts
from edge.models.families import Family, llama_tensor_name
from edge.models.sparse_layers import check_routing
from edge.models.spec import ModelSpec

_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}


def describe(config: Config) -> ModelSpec:
    check_routing(config, scoring_func="softmax", topk_method="greedy")
    experts = Experts(
        num_experts=config.size("num_local_experts", 8, most=MAX_EXPERTS),
        top_k=config.size("num_experts_per_tok", 2, most=MAX_EXPERTS),
        columns=config.size("intermediate_size"),
        activation=activation(config),
        renormalized=True,
    )
    return decoder(
        config,
        family="mixtral",
        windows=one_window(config),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        feed_forwards=(experts,) * num_layers(config),
    )


def tensor_name(role: str) -> str:
    match role.split("."):
        case ["layers", index, "router", suffix]:
            return f"model.layers.{index}.block_sparse_moe.gate.{suffix}"
        case ["layers", index, "experts", number, part, suffix]:
            name = f"experts.{number}.{_MATRICES[part]}.{suffix}"
            return f"model.layers.{index}.block_sparse_moe.{name}"
    return llama_tensor_name(role)


FAMILY = Family(describe=describe, tensor_name=tensor_name)
