"""Gemma 4: an encoder with norms around its parts, positions for each axis, and averaged patches.

The small sizes (E2B, E4B) keep inputs and outputs of products within bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.models.config import Config
from edge.models.gated_mlp import GatedMlp
from edge.models.spec import ModelSpec
from edge.models.towers.families import (
    TowerFamily,
    angle_base,
    encoder,
    pixel_terms,
    vision_activation,
    vision_of,
)
from edge.models.towers.positions import axial_frequencies
from edge.models.towers.tower import (
    MAX_PIXELS,
    MAX_SIDE,
    MAX_TABLE_SIDE,
    Merger,
    Projection,
    Tower,
    TowerNorm,
    Turns,
)

_MOST_ROWS = 1120
"""The most rows of a picture that its processor is made for."""


def describe(config: Config, processor: Config, model: ModelSpec) -> Tower:
    vision = vision_of(config)
    if vision.flag("attention_bias", False):
        raise vision.error("attention_bias of a tower is not supported")
    epsilon = vision.positive("rms_norm_eps", 1e-6)
    heads, hidden = vision.size("num_attention_heads", 12), vision.size("hidden_size", 768)
    if vision.size("num_key_value_heads", heads) != heads:
        raise vision.error("num_key_value_heads must be num_attention_heads")
    head_size = vision.size("head_dim", 64)
    layers = encoder(
        vision,
        GatedMlp(
            columns=vision.size("intermediate_size", 3072),
            activation=vision_activation(vision, "gelu_pytorch_tanh", "hidden_activation"),
            bias=False,
            has_post_norm=True,
        ),
        hidden_size=hidden,
        num_layers=vision.size("num_hidden_layers", 16),
        num_heads=heads,
        epsilon=epsilon,
        head_size=head_size,
        query_key_norm=True,
        value_norm=True,
        score_scale=1.0,
        has_post_norm=True,
    )
    angles = axial_frequencies(angle_base(vision, 100.0), head_size)
    side = vision.size("pooling_kernel_size", 3, most=MAX_SIDE)
    return Tower(
        encoder=layers,
        output_size=model.hidden_size,
        patch_size=vision.size("patch_size", 16, most=MAX_PIXELS),
        channels_last=True,
        patch_bias=False,
        table="axes",
        table_side=vision.size("position_embedding_size", 10240, most=MAX_TABLE_SIDE),
        turns=Turns(rows=angles, columns=angles, is_by_axis=True),
        side=side,
        merger=Merger(
            joining="mean",
            scale=hidden**0.5,
            standardized=vision.flag("standardize", False),
            row_norm=TowerNorm(kind="plain", epsilon=epsilon),
            projections=(Projection(outputs=model.hidden_size, bias=False),),
        ),
        max_patches=_MOST_ROWS * side**2,
        **_doubled(pixel_terms(processor, normalized=False)),
    )


def _doubled(pixels: Mapping[str, Any]) -> dict[str, Any]:
    """Pixels from -1 to 1 of those from 0 to 1."""
    return {
        "pixel_scale": tuple(2 * each for each in pixels["pixel_scale"]),
        "pixel_shift": tuple(2 * each - 1 for each in pixels["pixel_shift"]),
    }


_TOWER = "vision_tower."
_LAYER = f"{_TOWER}encoder.layers.{{}}."
_PRODUCTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

FAMILY = TowerFamily(
    describe=describe,
    names={
        "patches": f"{_TOWER}patch_embedder.input_proj.weight",
        "positions": f"{_TOWER}patch_embedder.position_embedding_table",
        "layers.attention_norm": f"{_LAYER}input_layernorm.weight",
        "layers.attention_post_norm": f"{_LAYER}post_attention_layernorm.weight",
        "layers.mlp_norm": f"{_LAYER}pre_feedforward_layernorm.weight",
        "layers.mlp_post_norm": f"{_LAYER}post_feedforward_layernorm.weight",
        "layers.query_norm": f"{_LAYER}self_attn.q_norm.weight",
        "layers.key_norm": f"{_LAYER}self_attn.k_norm.weight",
        **{f"layers.{role}": f"{_LAYER}{name}" for role, name in _PRODUCTS.items()},
        **{f"layers.{r}.weight": f"{_LAYER}{name}.linear.weight" for r, name in _PRODUCTS.items()},
        "merger.row_shift": f"{_TOWER}std_bias",
        "merger.row_factor": f"{_TOWER}std_scale",
        "merger.0": "embed_vision.embedding_projection",
    },
    stacked={"positions": ("positions.0", "positions.1")},
    is_bounded=True,
)
