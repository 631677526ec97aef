"""Phi-3 and Phi-4: Llama with fused matrices and LongRoPE."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, one_window
from edge.models.families import Family, llama_tensor_name
from edge.models.spec import ModelSpec

_OLD_NAMES = ("su", "yarn")
"""The names of LongRoPE in older files."""


def describe(config: Config) -> ModelSpec:
    rope = {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")}
    rope |= {key: "longrope" for key in ("rope_type", "type") if rope.get(key) in _OLD_NAMES}
    config = config.changed(
        rope_scaling=None,
        rope_parameters=rope,
        original_max_position_embeddings=config.size("original_max_position_embeddings", 4096),
    )
    return decoder(
        config,
        family="phi3",
        windows=one_window(config),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        model={"norm_epsilon": config.number("rms_norm_eps", 1e-5)},
    )


FAMILY = Family(
    describe=describe,
    tensor_name=llama_tensor_name,
    fused={
        "self_attn.qkv_proj": ("query", "key", "value"),
        "mlp.gate_up_proj": ("gate", "up"),
    },
)
