"""Qwen2: Llama with biases on query, key and value, and a window from some layer on."""

from __future__ import annotations

from edge.models.config import Config, common_fields, layer_windows
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    fields = common_fields(config)
    fields["windows"] = layer_windows(config, fields["num_layers"])
    fields.update(qkv_bias=True, output_bias=False, mlp_bias=False)
    return ModelSpec(family="qwen2", **fields)


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
