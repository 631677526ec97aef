"""Qwen3.5: most layers are linear attention, the others attention with gated outputs."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.delta_layers import delta_decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.further_head import named_apart
from edge.models.spec import ModelSpec

FUSED = {"linear_attn.in_proj_qkv": ("linear_query", "linear_key", "linear_value")}


def describe(config: Config) -> ModelSpec:
    return delta_decoder(config, family="qwen3_5_text")


FAMILY = Family(
    describe=describe,
    tensor_name=llama_tensor_name,
    norm_offset=1.0,
    fused=FUSED,
    further_name=named_apart(llama_tensor_name),
)
