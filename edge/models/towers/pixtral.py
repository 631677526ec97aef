"""Mistral 3: Pixtral's encoder with rotary positions on two axes, and blocks of patches."""

from __future__ import annotations

import numpy as np

from edge.models.config import Config
from edge.models.gated_mlp import GatedMlp
from edge.models.pictures import MAX_PATCHES
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
from edge.models.towers.tower import MAX_SIDE, Merger, Projection, Tower, TowerNorm, Turns

_EPSILON = 1e-5
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def describe(config: Config, processor: Config, model: ModelSpec) -> Tower:
    vision = vision_of(config)
    if config.values.get("vision_feature_layer", -1) != -1:
        raise config.error("vision_feature_layer must be -1, the last layer")
    hidden, patch = vision.size("hidden_size", 1024), square(vision, "patch_size", 16)
    heads = vision.size("num_attention_heads", 16)
    layers = encoder(
        vision,
        GatedMlp(
            columns=vision.size("intermediate_size", 4096),
            activation=vision_activation(vision, "gelu"),
            bias=False,
        ),
        hidden_size=hidden,
        num_layers=vision.size("num_hidden_layers", 24),
        num_heads=heads,
        epsilon=_EPSILON,
    )
    has_bias, size = config.flag("multimodal_projector_bias", False), model.hidden_size
    between = vision_activation(config, "gelu", "projector_hidden_act")
    side = square(vision, "image_size", 1024) // patch
    return Tower(
        encoder=layers,
        output_size=size,
        patch_size=patch,
        patch_bias=False,
        table=None,
        first_norm=TowerNorm(kind="rms", epsilon=_EPSILON),
        turns=_turns(angle_base(vision), hidden // heads),
        side=config.size("spatial_merge_size", 2, most=MAX_SIDE),
        merger=Merger(
            joining="channels",
            patch_norm=TowerNorm(kind="rms", epsilon=model.norm_epsilon),
            projections=(
                Projection(outputs=hidden, bias=False),
                Projection(outputs=size, bias=has_bias, activation=between),
                Projection(outputs=size, bias=has_bias),
            ),
        ),
        max_patches=min(MAX_PATCHES, side**2),
        **pixel_terms(processor, mean=_MEAN, deviation=_DEVIATION),
    )


def _turns(theta: float, head_size: int) -> Turns:
    """Pairs turn by row and by column in turns, from the fastest to the slowest."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    angles = [float(each) for each in np.float32(1) / np.power(np.float32(theta), exponents)]
    return Turns(rows=tuple(angles[::2]), columns=tuple(angles[1::2]))


FAMILY = TowerFamily(
    describe=describe,
    names={
        "patches": "vision_tower.patch_conv.weight",
        "first_norm": "vision_tower.ln_pre.weight",
        "layers.attention_norm": "vision_tower.transformer.layers.{}.attention_norm.weight",
        "layers.query": "vision_tower.transformer.layers.{}.attention.q_proj",
        "layers.key": "vision_tower.transformer.layers.{}.attention.k_proj",
        "layers.value": "vision_tower.transformer.layers.{}.attention.v_proj",
        "layers.output": "vision_tower.transformer.layers.{}.attention.o_proj",
        "layers.mlp_norm": "vision_tower.transformer.layers.{}.ffn_norm.weight",
        "layers.gate": "vision_tower.transformer.layers.{}.feed_forward.gate_proj",
        "layers.up": "vision_tower.transformer.layers.{}.feed_forward.up_proj",
        "layers.down": "vision_tower.transformer.layers.{}.feed_forward.down_proj",
        "merger.patch_norm": "multi_modal_projector.norm.weight",
        "merger.0": "multi_modal_projector.patch_merger.merging_layer",
        "merger.1": "multi_modal_projector.linear_1",
        "merger.2": "multi_modal_projector.linear_2",
    },
)
