"""Mistral: Llama with one sliding window for every layer, and never a bias."""

from __future__ import annotations

from edge.models.config import Config, common_fields
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    fields = common_fields(config)
    if config.values.get("sliding_window") is not None:
        fields["windows"] = (config.integer("sliding_window"),) * fields["num_layers"]
    fields.update(qkv_bias=False, output_bias=False, mlp_bias=False)
    return ModelSpec(family="mistral", **fields)


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
