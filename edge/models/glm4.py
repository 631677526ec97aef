"""GLM-4 (0414): interleaved rotation of half of each head; norms before and after each part."""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, head_size_of, num_layers
from edge.models.families import Family, llama_tensor_name
from edge.models.rope import read_rotary
from edge.models.spec import ModelSpec

_HEAD_SIZE = 128


def describe(config: Config) -> ModelSpec:
    head_size = head_size_of(config, _HEAD_SIZE)
    rotary = read_rotary(config, head_size, partial=0.5, is_interleaved=True)
    return decoder(
        config,
        family="glm4",
        head_size=_HEAD_SIZE,
        rotaries=(rotary,) * num_layers(config),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=False,
        mlp_bias=False,
        mixer={"has_post_norm": True},
        feed_forward={"has_post_norm": True},
        model={"norm_epsilon": config.number("rms_norm_eps", 1.5625e-7)},
    )


FAMILY = Family(
    describe=describe,
    tensor_name=llama_tensor_name,
    fused={"mlp.gate_up_proj": ("gate", "up")},
)
