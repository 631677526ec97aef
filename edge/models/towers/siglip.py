"""SigLIP: the encoder of several families of towers."""

from __future__ import annotations

from typing import Any

from edge.models.config import Config
from edge.models.plain_mlp import PlainMlp
from edge.models.towers.families import encoder, square, vision_activation
from edge.models.towers.tower import TowerNorm


def siglip(
    vision: Config, *, hidden: int, layers: int, heads: int, patch: int
) -> tuple[dict[str, Any], TowerNorm]:
    """Fields of a Tower, and the norm behind the layers. hidden, layers, heads, patch: the family's
    defaults."""
    epsilon = vision.positive("layer_norm_eps", 1e-6)
    patch = square(vision, "patch_size", patch)
    side = square(vision, "image_size", 224) // patch
    if side < 1:
        raise vision.error("patch_size must be at most image_size")
    block = PlainMlp(
        columns=vision.size("intermediate_size", 3072),
        activation=vision_activation(vision, "gelu_pytorch_tanh"),
        bias=True,
        norm_bias=True,
    )
    layers_of = encoder(
        vision,
        block,
        hidden_size=vision.size("hidden_size", hidden),
        num_layers=vision.size("num_hidden_layers", layers),
        num_heads=vision.size("num_attention_heads", heads),
        epsilon=epsilon,
        qkv_bias=True,
        output_bias=True,
        norm_bias=True,
    )
    facts = {
        "encoder": layers_of,
        "patch_size": patch,
        "patch_bias": True,
        "table": "buckets",
        "table_side": side,
        "max_patches": side**2,
    }
    return facts, TowerNorm(kind="layer", epsilon=epsilon)


NAMES = {
    "patches": "embeddings.patch_embedding.weight",
    "patch_bias": "embeddings.patch_embedding.bias",
    "positions": "embeddings.position_embedding.weight",
    "merger.patch_norm": "post_layernorm.weight",
    "merger.patch_norm_bias": "post_layernorm.bias",
    "layers.attention_norm": "encoder.layers.{}.layer_norm1.weight",
    "layers.attention_norm_bias": "encoder.layers.{}.layer_norm1.bias",
    "layers.query": "encoder.layers.{}.self_attn.q_proj",
    "layers.key": "encoder.layers.{}.self_attn.k_proj",
    "layers.value": "encoder.layers.{}.self_attn.v_proj",
    "layers.output": "encoder.layers.{}.self_attn.out_proj",
    "layers.mlp_norm": "encoder.layers.{}.layer_norm2.weight",
    "layers.mlp_norm_bias": "encoder.layers.{}.layer_norm2.bias",
    "layers.up": "encoder.layers.{}.mlp.fc1",
    "layers.down": "encoder.layers.{}.mlp.fc2",
}


def siglip_names(prefix: str) -> dict[str, str]:
    """The names of its tensors behind a prefix."""
    return {role: f"{prefix}{name}" for role, name in NAMES.items()}
