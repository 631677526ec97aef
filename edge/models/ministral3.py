"""Ministral 3: Mistral with YaRN, and scaled queries beyond the trained context."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, one_window
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec

_USUAL = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The default rotation."""


def describe(config: Config) -> ModelSpec:
    """The context, limited to where the scaling of queries would begin, which is not computed."""
    config = config.filled(_USUAL)
    if config.values.get("rope_parameters") is None:
        config = config.changed(rope_parameters=_ROPE)
    rope = Config(config.mapping("rope_parameters"), source=f"{config.source}: rope_parameters")
    context_tokens = config.size("max_position_embeddings", 262_144)
    if rope.number("llama_4_scaling_beta", 0.0):
        trained = rope.size("original_max_position_embeddings", context_tokens)
        context_tokens = min(context_tokens, trained)
    return decoder(
        config,
        family="ministral3",
        head_size=128,
        windows=one_window(config),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        model={
            "context_tokens": context_tokens,
            "norm_epsilon": config.number("rms_norm_eps", 1e-5),
        },
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
