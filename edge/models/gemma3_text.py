"""Gemma 3: most layers have a sliding window, and their own rotary frequencies."""

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
from edge.models.families import READS_PICTURES, Family
from edge.models.gemma import HEAD_SIZE, NORM_OFFSET, USUAL, gemma_facts, gemma_tensor_name
from edge.models.rope import read_rotary
from edge.models.rotary import Rotary
from edge.models.spec import ModelSpec

_PATTERN = 6
"""The interval of layers with full attention."""


def describe(config: Config) -> ModelSpec:
    config = config.filled(USUAL)
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention: such a model generates no text")
    pattern = config.size("sliding_window_pattern", _PATTERN)
    usual = [LOCAL if (number + 1) % pattern else GLOBAL for number in range(num_layers(config))]
    kinds = layer_kinds(config, usual=usual)
    rotary = {kind: _rotary(config, kind) for kind in dict.fromkeys(kinds)}
    facts = gemma_facts(config, context_tokens=131_072, caps=(None, None))
    facts["mixer"]["query_key_norm"] = True
    facts["mixer"]["sees_pictures"] = config.flag(READS_PICTURES, False)
    return decoder(
        config,
        family="gemma3_text",
        windows=layer_windows(config, kinds, usual=4096),
        rotaries=[rotary[kind] for kind in kinds],
        **facts,
    )


def _rotary(config: Config, kind: str) -> Rotary:
    """The rotations; older files scale only the layers without a window."""
    head_size = head_size_of(config, HEAD_SIZE)
    if kind == GLOBAL:
        return read_rotary(config, head_size, layer_type=kind, theta=1_000_000.0)
    config = config.changed(rope_scaling=None, rope_theta=config.values.get("rope_local_base_freq"))
    return read_rotary(config, head_size, layer_type=kind)


FAMILY = Family(describe=describe, tensor_name=gemma_tensor_name, norm_offset=NORM_OFFSET)
