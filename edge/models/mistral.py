"""Mistral: Llama with one sliding window for every layer, and never a bias."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, one_window
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    return decoder(
        config,
        family="mistral",
        windows=one_window(config),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
