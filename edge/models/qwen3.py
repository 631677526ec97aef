"""Qwen3: Llama with an RMSNorm on each head of query and key, and a head size of its own."""

from __future__ import annotations

from edge.models.config import Config, common_fields, layer_windows
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    fields = common_fields(config, head_size=128)
    fields["windows"] = layer_windows(config, fields["num_layers"])
    fields["query_key_norm"] = True
    return ModelSpec(family="qwen3", **fields)


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
