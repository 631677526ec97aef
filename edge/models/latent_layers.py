"""Latent attention in the config.json fields of families after DeepSeek-V2."""

from __future__ import annotations

import math
from typing import Any

from edge.models.attention import Attention
from edge.models.config import Config
from edge.models.families import llama_tensor_name
from edge.models.latent_attention import Latent
from edge.models.rope import read_rotary


def latent_attention(config: Config) -> Attention:
    heads, shared = config.size("num_attention_heads"), config.size("qk_rope_head_dim")
    size = config.size("qk_nope_head_dim") + shared
    has_bias = config.flag("attention_bias", False)
    rank = config.values.get("q_lora_rank")
    return Attention(
        num_heads=heads,
        num_kv_heads=1,
        head_size=size,
        rotary=read_rotary(config, shared, is_interleaved=config.flag("rope_interleave", True)),
        window=None,
        qkv_bias=False,
        output_bias=has_bias,
        query_key_norm=False,
        score_scale=_gain(config) / math.sqrt(size),
        latent=Latent(
            query_rank=None if rank is None else config.size("q_lora_rank"),
            rank=config.size("kv_lora_rank"),
            shared_size=shared,
            value_size=config.size("v_head_dim"),
            bias=has_bias,
        ),
    )


def _gain(config: Config) -> float:
    """YaRN's gain of scores for contexts beyond the trained one."""
    found: dict[str, Any] = {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")}
    rope = Config(found, source=f"{config.source}: rope_parameters")
    share = rope.number("mscale_all_dim", 0.0)
    if found.get("rope_type", found.get("type", "default")) == "default" or not share:
        return 1.0
    factor = rope.positive("factor")
    return 1.0 if factor <= 1 else (0.1 * share * math.log(factor) + 1.0) ** 2


_NAMES = {
    "query_down": "q_a_proj",
    "query_latent_norm": "q_a_layernorm.weight",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm.weight",
    "key_value": "kv_b_proj",
}


def latent_tensor_name(role: str) -> str:
    if role.startswith("layers."):
        _layers, number, part, *suffix = role.split(".")
        if part in _NAMES:
            return ".".join(["model.layers", number, "self_attn", _NAMES[part], *suffix])
    return llama_tensor_name(role).replace(".mlp.shared_expert.", ".mlp.shared_experts.")
