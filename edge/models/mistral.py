"""Mistral: Llama with one sliding window for every layer, and never a bias."""

from __future__ import annotations

from edge.models.config import Config, decoder, num_layers
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    windows = None
    if config.values.get("sliding_window") is not None:
        windows = (config.integer("sliding_window"),) * num_layers(config)
    return decoder(
        config,
        family="mistral",
        windows=windows,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
