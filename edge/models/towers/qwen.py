"""Qwen3-VL and Qwen3.5: positions from a table and on two axes.

Qwen3-VL also has rows of earlier layers (DeepStack), which its text adds behind its first layers.
"""

from __future__ import annotations

import math

from edge.models.config import Config
from edge.models.families import deep_layers
from edge.models.pictures import MAX_PATCHES
from edge.models.plain_mlp import PlainMlp
from edge.models.spec import ModelSpec
from edge.models.towers.families import (
    TowerFamily,
    angle_base,
    encoder,
    pixel_terms,
    square,
    vision_activation,
    vision_of,
)
from edge.models.towers.positions import axial_frequencies
from edge.models.towers.tower import (
    MAX_FRAMES,
    MAX_SIDE,
    Merger,
    Projection,
    Tower,
    TowerNorm,
    Turns,
)

_NORM = TowerNorm(kind="layer", epsilon=1e-6)


def describe(config: Config, processor: Config, model: ModelSpec) -> Tower:
    vision, layers_of_rows = vision_of(config), deep_layers(config.values)
    if not isinstance(layers_of_rows, list):
        raise vision.error("deepstack_visual_indexes must be a list of layers")
    hidden, heads = vision.size("hidden_size", 1152), vision.size("num_heads", 16)
    layers = encoder(
        vision,
        PlainMlp(
            columns=vision.size("intermediate_size", 4304),
            activation=vision_activation(vision, "gelu_pytorch_tanh"),
            bias=True,
            norm_bias=True,
        ),
        hidden_size=hidden,
        num_layers=vision.size("depth", 27),
        num_heads=heads,
        epsilon=_NORM.epsilon,
        qkv_bias=True,
        output_bias=True,
        norm_bias=True,
    )
    side = vision.size("spatial_merge_size", 2, most=MAX_SIDE)
    projections = (
        Projection(outputs=hidden * side**2, bias=True, activation="gelu"),
        Projection(outputs=model.hidden_size, bias=True),
    )
    angles = axial_frequencies(angle_base(vision), hidden // heads)
    merger = Merger(joining="patches", patch_norm=_NORM, projections=projections)
    deep = Merger(joining="patches", row_norm=_NORM, projections=projections)
    return Tower(
        encoder=layers,
        output_size=model.hidden_size,
        patch_size=square(vision, "patch_size", 16),
        frames=square(vision, "temporal_patch_size", 2, most=MAX_FRAMES),
        patch_bias=True,
        table="bilinear",
        table_side=math.isqrt(vision.size("num_position_embeddings", 2304)),
        turns=Turns(rows=angles, columns=angles),
        side=side,
        merger=merger,
        deep=tuple((number, deep) for number in layers_of_rows),
        max_patches=MAX_PATCHES,
        **pixel_terms(processor),
    )


FAMILY = TowerFamily(
    describe=describe,
    names={
        "patches": "visual.patch_embed.proj.weight",
        "patch_bias": "visual.patch_embed.proj.bias",
        "positions": "visual.pos_embed.weight",
        "layers.attention_norm": "visual.blocks.{}.norm1.weight",
        "layers.attention_norm_bias": "visual.blocks.{}.norm1.bias",
        "layers.query": "visual.blocks.{}.attn.q",
        "layers.key": "visual.blocks.{}.attn.k",
        "layers.value": "visual.blocks.{}.attn.v",
        "layers.output": "visual.blocks.{}.attn.proj",
        "layers.mlp_norm": "visual.blocks.{}.norm2.weight",
        "layers.mlp_norm_bias": "visual.blocks.{}.norm2.bias",
        "layers.up": "visual.blocks.{}.mlp.linear_fc1",
        "layers.down": "visual.blocks.{}.mlp.linear_fc2",
        "merger.patch_norm": "visual.merger.norm.weight",
        "merger.patch_norm_bias": "visual.merger.norm.bias",
        "merger.0": "visual.merger.linear_fc1",
        "merger.1": "visual.merger.linear_fc2",
        "deep.row_norm": "visual.deepstack_merger_list.{}.norm.weight",
        "deep.row_norm_bias": "visual.deepstack_merger_list.{}.norm.bias",
        "deep.0": "visual.deepstack_merger_list.{}.linear_fc1",
        "deep.1": "visual.deepstack_merger_list.{}.linear_fc2",
    },
    fused={"attn.qkv": ("query", "key", "value")},
)
