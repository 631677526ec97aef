"""The common parts of the Gemmas: four norms per layer, with weights stored less 1."""

from __future__ import annotations

import math
from typing import Any

from edge.models.config import Config
from edge.models.decoder import activation
from edge.models.families import llama_tensor_name

_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}

USUAL = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
HEAD_SIZE = 256
NORM_OFFSET = 1.0


def gemma_facts(
    config: Config, *, context_tokens: int, caps: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Keywords of `decoder`. caps: the default soft caps of scores and of logits."""
    score_cap, logit_cap = (
        None if config.values.get(name, usual) is None else config.positive(name, usual)
        for name, usual in zip(
            ("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True
        )
    )
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    return {
        "head_size": HEAD_SIZE,
        "mlp_bias": False,
        "mixer": {"score_scale": scale, "soft_cap": score_cap, "has_post_norm": True},
        "feed_forward": {
            "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
            "has_post_norm": True,
        },
        "model": {
            "context_tokens": config.size("max_position_embeddings", context_tokens),
            "tied_embeddings": config.flag("tie_word_embeddings", True),
            "embedding_scale": math.sqrt(config.size("hidden_size")),
            "logit_soft_cap": logit_cap,
        },
    }


def gemma_tensor_name(role: str) -> str:
    part = role.rsplit(".", 1)[-1]
    if part not in _NORMS:
        return llama_tensor_name(role)
    return f"model.layers.{role.split('.')[1]}.{_NORMS[part]}"
