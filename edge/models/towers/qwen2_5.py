"""Qwen2.5-VL: rotary positions on two axes, and most layers in windows."""

from __future__ import annotations

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

_EPSILON = 1e-6
_WHOLE_LAYERS = [7, 15, 23, 31]
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def describe(config: Config, processor: Config, model: ModelSpec) -> Tower:
    vision = vision_of(config)
    hidden, heads = vision.size("hidden_size", 3584), vision.size("num_heads", 16)
    layers = encoder(
        vision,
        GatedMlp(
            columns=vision.size("intermediate_size", 3420),
            activation=vision_activation(vision, "silu"),
            bias=True,
        ),
        hidden_size=hidden,
        num_layers=vision.size("depth", 32),
        num_heads=heads,
        epsilon=_EPSILON,
        qkv_bias=True,
        output_bias=True,
    )
    patch = square(vision, "patch_size", 14)
    side = vision.size("spatial_merge_size", 2, most=MAX_SIDE)
    angles = axial_frequencies(angle_base(vision), hidden // heads)
    whole = vision.values.get("fullatt_block_indexes", _WHOLE_LAYERS)
    return Tower(
        encoder=layers,
        output_size=model.hidden_size,
        patch_size=patch,
        frames=square(vision, "temporal_patch_size", 2, most=MAX_FRAMES),
        patch_bias=False,
        table=None,
        turns=Turns(rows=angles, columns=angles),
        window=vision.size("window_size", 112) // side // patch,
        whole_layers=whole,
        side=side,
        merger=Merger(
            joining="patches",
            patch_norm=TowerNorm(kind="rms", epsilon=_EPSILON),
            projections=(
                Projection(outputs=hidden * side**2, bias=True, activation="gelu"),
                Projection(outputs=model.hidden_size, bias=True),
            ),
        ),
        max_patches=MAX_PATCHES,
        **pixel_terms(processor, mean=_MEAN, deviation=_DEVIATION),
    )


FAMILY = TowerFamily(
    describe=describe,
    names={
        "patches": "visual.patch_embed.proj.weight",
        "layers.attention_norm": "visual.blocks.{}.norm1.weight",
        "layers.query": "visual.blocks.{}.attn.q",
        "layers.key": "visual.blocks.{}.attn.k",
        "layers.value": "visual.blocks.{}.attn.v",
        "layers.output": "visual.blocks.{}.attn.proj",
        "layers.mlp_norm": "visual.blocks.{}.norm2.weight",
        "layers.gate": "visual.blocks.{}.mlp.gate_proj",
        "layers.up": "visual.blocks.{}.mlp.up_proj",
        "layers.down": "visual.blocks.{}.mlp.down_proj",
        "merger.patch_norm": "visual.merger.ln_q.weight",
        "merger.0": "visual.merger.mlp.0",
        "merger.1": "visual.merger.mlp.2",
    },
    fused={"attn.qkv": ("query", "key", "value")},
)
