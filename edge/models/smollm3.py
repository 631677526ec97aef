"""SmolLM3: Llama with some layers without positions (NoPE)."""

from __future__ import annotations

from collections.abc import Sequence

from edge.models.config import Config
from edge.models.decoder import (
    GLOBAL,
    LOCAL,
    decoder,
    head_size_of,
    layer_kinds,
    layer_windows,
    num_layers,
)
from edge.models.families import Family, llama_tensor_name
from edge.models.rope import read_rotary
from edge.models.rotary import NO_ROTARY
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    turning = _turning_layers(config)
    rotary = read_rotary(config, head_size_of(config), theta=2_000_000.0)
    windows = None
    if config.flag("use_sliding_window", False):
        kinds = layer_kinds(config, usual=[GLOBAL if turns else LOCAL for turns in turning])
        windows = layer_windows(config, kinds)
    return decoder(
        config,
        family="smollm3",
        windows=windows,
        rotaries=[rotary if turns else NO_ROTARY for turns in turning],
        model={"tied_embeddings": config.flag("tie_word_embeddings", True)},
    )


def _turning_layers(config: Config) -> Sequence[bool]:
    count = num_layers(config)
    listed = config.values.get("no_rope_layers")
    if listed is None:
        interval = config.size("no_rope_layer_interval", 4)
        return [(number + 1) % interval != 0 for number in range(count)]
    if (
        not isinstance(listed, list)
        or len(listed) != count
        or any(type(each) is not int or each not in (0, 1) for each in listed)
    ):
        raise config.error("no_rope_layers must be 1 for each layer with rotary positions, else 0")
    return [each == 1 for each in listed]


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
