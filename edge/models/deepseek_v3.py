"""DeepSeek-V3 and R1: latent attention; experts, and a shared one, in all but the first layers.

The first layer for multi-token prediction in a checkpoint is its further head.
"""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, num_layers
from edge.models.families import Family
from edge.models.further_head import behind_the_last
from edge.models.glm4_moe import experts_beside_shared
from edge.models.latent_layers import latent_attention, latent_tensor_name
from edge.models.spec import MAX_LAYERS, ModelSpec

_USUAL = {
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}


def describe(config: Config) -> ModelSpec:
    if "q_lora_rank" not in config.values:
        config = config.changed(q_lora_rank=1536)
    config = config.filled(_USUAL)
    first = config.integer("first_k_dense_replace")
    if not 0 <= first <= MAX_LAYERS:
        raise config.error(f"first_k_dense_replace must lie in 0..{MAX_LAYERS}, not {first}")
    count, experts = num_layers(config), experts_beside_shared(config)
    return decoder(
        config,
        family="deepseek_v3",
        rotaries=(latent_attention(config).rotary,) * count,
        mixers=(latent_attention(config),) * count,
        mlp_bias=False,
        feed_forwards=[None if number < first else experts for number in range(count)],
    )


FAMILY = Family(
    describe=describe,
    tensor_name=latent_tensor_name,
    further_name=behind_the_last(latent_tensor_name),
)
