"""Qwen3 with experts in place of the feed-forward block, in some layers or in all."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, one_window
from edge.models.families import Family, llama_tensor_name
from edge.models.sparse_layers import sparse_layers
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    has_window = config.flag("use_sliding_window", False)
    return decoder(
        config,
        family="qwen3_moe",
        windows=one_window(config) if has_window else None,
        mlp_bias=False,
        mixer={"query_key_norm": True},
        feed_forwards=sparse_layers(config),
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
