"""Qwen3-Next: like Qwen3.5, with experts in some layers or in all, and other tensor names."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.delta_layers import delta_decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.further_head import named_apart
from edge.models.sparse_layers import shared_expert, sparse_layers
from edge.models.spec import ModelSpec

_USUAL = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}


def describe(config: Config) -> ModelSpec:
    config = config.filled(_USUAL)
    shared = shared_expert(config, usual=512)
    layers = sparse_layers(config, renormalized=True, shared=shared)
    return delta_decoder(config, family="qwen3_next", feed_forwards=layers)


FAMILY = Family(
    describe=describe,
    tensor_name=llama_tensor_name,
    norm_offset=1.0,
    fused_by_head={
        "linear_attn.in_proj_qkvz": ("linear_query", "linear_key", "linear_value", "linear_gate"),
        "linear_attn.in_proj_ba": ("linear_beta", "linear_decay"),
    },
    further_name=named_apart(llama_tensor_name),
)
