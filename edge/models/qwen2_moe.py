"""Qwen2 with experts, in some layers or in all, and a shared expert."""

from __future__ import annotations

from collections.abc import Sequence

from edge.models.config import Config
from edge.models.decoder import GLOBAL, LOCAL, decoder, layer_kinds, layer_windows, num_layers
from edge.models.families import Family, llama_tensor_name
from edge.models.sparse_layers import shared_expert, sparse_layers
from edge.models.spec import ModelSpec

_USUAL = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 4096,
}


def describe(config: Config) -> ModelSpec:
    config = config.filled(_USUAL)
    return decoder(
        config,
        family="qwen2_moe",
        windows=_windows(config),
        qkv_bias=config.flag("qkv_bias", True),
        output_bias=False,
        mlp_bias=False,
        feed_forwards=sparse_layers(config, shared=shared_expert(config, usual=5632)),
    )


def _windows(config: Config) -> Sequence[int | None]:
    """The windows of the layers; by default of every other one of the first layers."""
    count = num_layers(config)
    if not config.flag("use_sliding_window", False):
        return (None,) * count
    most = config.integer("max_window_layers")
    usual = [LOCAL if not number % 2 and number < most else GLOBAL for number in range(count)]
    return layer_windows(config, layer_kinds(config, usual=usual))


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
