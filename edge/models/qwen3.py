"""Qwen3: Llama with an RMSNorm on each head of query and key, and a head size of its own."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, switched_windows
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    return decoder(
        config,
        family="qwen3",
        head_size=128,
        windows=switched_windows(config),
        mixer={"query_key_norm": True},
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
