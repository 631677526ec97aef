"""Granite: Llama with multipliers."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec


def describe(config: Config) -> ModelSpec:
    """Each part's output is multiplied by r. A norm is invariant to scale, except for its epsilon:
    so the hidden state is kept divided by r, and parts add as usual."""
    part = config.positive("residual_multiplier", 1.0)
    return decoder(
        config,
        family="granite",
        mixer={"score_scale": config.positive("attention_multiplier", 1.0)},
        model={
            "embedding_scale": config.positive("embedding_multiplier", 1.0) / part,
            "norm_epsilon": config.number("rms_norm_eps", 1e-6) / part**2,
            "logit_scale": 1.0 / config.positive("logits_scaling", 1.0),
        },
    )


FAMILY = Family(describe=describe, tensor_name=llama_tensor_name)
