"""OLMo 2: outputs of parts are normed, not inputs; all heads are normed together."""

from __future__ import annotations

from typing import Any

from edge.models.config import Config
from edge.models.decoder import decoder
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec

_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def describe(config: Config) -> ModelSpec:
    return decoder(config, family="olmo2", **olmo_facts(config))


def olmo_facts(config: Config) -> dict[str, Any]:
    """Keywords of `decoder`."""
    norms = {"has_norm": False, "has_post_norm": True}
    return {
        "mlp_bias": False,
        "mixer": {**norms, "joint_norm": True},
        "feed_forward": norms,
        "model": {"norm_epsilon": config.number("rms_norm_eps", 1e-5)},
    }


def olmo_tensor_name(role: str) -> str:
    part = role.rsplit(".", 1)[-1]
    if part not in _NORMS:
        return llama_tensor_name(role)
    return f"model.layers.{role.split('.')[1]}.{_NORMS[part]}"


FAMILY = Family(describe=describe, tensor_name=olmo_tensor_name)
