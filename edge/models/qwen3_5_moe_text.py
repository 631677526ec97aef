"""Qwen3.5 with experts and a shared expert in every layer."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.delta_layers import delta_decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.further_head import named_apart
from edge.models.qwen3_5_text import FUSED
from edge.models.sparse_layers import shared_expert, sparse_layers
from edge.models.spec import ModelSpec

_USUAL = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_ALWAYS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Fixed values of fields that the family does not have."""


def describe(config: Config) -> ModelSpec:
    config = config.filled(_USUAL).changed(**_ALWAYS)
    config = config.filled({"intermediate_size": config.size("moe_intermediate_size")})
    layers = sparse_layers(config, shared=shared_expert(config, usual=512))
    return delta_decoder(config, family="qwen3_5_moe_text", feed_forwards=layers)


FAMILY = Family(
    describe=describe,
    tensor_name=llama_tensor_name,
    norm_offset=1.0,
    fused=FUSED,
    stacked_experts={
        "mlp.experts.gate_up_proj": ("gate", "up"),
        "mlp.experts.down_proj": ("down",),
    },
    further_name=named_apart(llama_tensor_name),
)
