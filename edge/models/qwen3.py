"""Qwen3: Llama with an RMSNorm on each head of query and key, and a head size of its own."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, head_size_of, num_layers, switched_windows
from edge.models.families import Family, llama_tensor_name
from edge.models.rope import read_rotary
from edge.models.spec import ModelSpec

_HEAD_SIZE = 128


def describe(config: Config) -> ModelSpec:
    rotary = read_rotary(config, head_size_of(config, _HEAD_SIZE), alternates_axes=True)
    return decoder(
        config,
        family="qwen3",
        head_size=_HEAD_SIZE,
        rotaries=(rotary,) * num_layers(config),
        windows=switched_windows(config),
        mixer={"query_key_norm": True},
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
