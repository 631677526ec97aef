"""Gemma 2: a sliding window in every other layer, soft caps of scores and logits."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import GLOBAL, LOCAL, decoder, layer_kinds, layer_windows, num_layers
from edge.models.families import Family
from edge.models.gemma import NORM_OFFSET, USUAL, gemma_facts, gemma_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    config = config.filled({**USUAL, "vocab_size": 256_000})
    usual = [GLOBAL if number % 2 else LOCAL for number in range(num_layers(config))]
    return decoder(
        config,
        family="gemma2",
        windows=layer_windows(config, layer_kinds(config, usual=usual), usual=4096),
        **gemma_facts(config, context_tokens=8192, caps=(50.0, 30.0)),
    )


FAMILY = Family(describe=describe, tensor_name=gemma_tensor_name, norm_offset=NORM_OFFSET)
