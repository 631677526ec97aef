"""Qwen2: Llama with biases on query, key and value, and a sliding window from some layer on."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, switched_windows
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    return decoder(
        config,
        family="qwen2",
        windows=switched_windows(config),
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
