"""Llama 2 and 3.x."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    return decoder(config, family="llama")


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
