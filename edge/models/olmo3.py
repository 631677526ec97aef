"""OLMo 3: OLMo 2 with sliding windows in three of four layers, without scaled frequencies."""

from __future__ import annotations

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
from edge.models.families import Family
from edge.models.olmo2 import olmo_facts, olmo_tensor_name
from edge.models.rope import read_rotary
from edge.models.spec import ModelSpec

_THETA = 500_000.0


def describe(config: Config) -> ModelSpec:
    usual = [LOCAL if (number + 1) % 4 else GLOBAL for number in range(num_layers(config))]
    kinds = layer_kinds(config, usual=usual)
    rotary = {
        kind: read_rotary(
            config if kind == GLOBAL else config.changed(rope_scaling=None),
            head_size_of(config),
            layer_type=kind,
            theta=_THETA,
        )
        for kind in dict.fromkeys(kinds)
    }
    return decoder(
        config,
        family="olmo3",
        windows=layer_windows(config, kinds, usual=4096),
        rotaries=[rotary[kind] for kind in kinds],
        **olmo_facts(config),
    )


FAMILY = Family(describe=describe, tensor_name=olmo_tensor_name)
