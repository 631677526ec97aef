"""Qwen3 with experts in place of the feed-forward block, in some layers or in all."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, head_size_of, num_layers, one_window
from edge.models.families import Family, llama_tensor_name
from edge.models.rope import read_rotary
from edge.models.sparse_layers import sparse_layers
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    has_window = config.flag("use_sliding_window", False)
    rotary = read_rotary(config, head_size_of(config), alternates_axes=True)
    return decoder(
        config,
        family="qwen3_moe",
        windows=one_window(config) if has_window else None,
        rotaries=(rotary,) * num_layers(config),
        mlp_bias=False,
        mixer={"query_key_norm": True},
        feed_forwards=sparse_layers(config),
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
