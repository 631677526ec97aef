"""GLM-4.7-Flash: latent attention; experts, and a shared one, in all layers but the first.

The layer for multi-token prediction in a checkpoint is its further head.
"""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import decoder, num_layers
from edge.models.families import Family
from edge.models.further_head import behind_the_last
from edge.models.glm4_moe import experts_beside_shared
from edge.models.latent_layers import latent_attention, latent_tensor_name
from edge.models.spec import ModelSpec

_USUAL = {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
_DENSE, _SPARSE = "dense", "sparse"


def describe(config: Config) -> ModelSpec:
    if "q_lora_rank" not in config.values:
        config = config.changed(q_lora_rank=768)
    config = config.filled(_USUAL)
    count, experts = num_layers(config), experts_beside_shared(config)
    kinds = config.values.get("mlp_layer_types")
    if kinds is None:
        kinds = [_DENSE, *[_SPARSE] * (count - 1)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(kind not in (_DENSE, _SPARSE) for kind in kinds)
    ):
        raise config.error(f"mlp_layer_types must be {_DENSE} or {_SPARSE} for each layer")
    return decoder(
        config,
        family="glm4_moe_lite",
        rotaries=(latent_attention(config).rotary,) * count,
        mixers=(latent_attention(config),) * count,
        mlp_bias=False,
        feed_forwards=[None if kind == _DENSE else experts for kind in kinds],
    )


FAMILY = Family(
    describe=describe,
    tensor_name=latent_tensor_name,
    further_name=behind_the_last(latent_tensor_name),
)
