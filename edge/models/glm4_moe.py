"""GLM-4.5 and later with experts: in all but the first layers, with shared experts.

The layer for multi-token prediction in a checkpoint is its further head.
"""

from __future__ import annotations

from edge.models.config import Config
from edge.models.decoder import activation, decoder, head_size_of, num_layers
from edge.models.experts import MAX_EXPERTS, Experts, SharedExpert
from edge.models.families import Family, llama_tensor_name
from edge.models.further_head import behind_the_last
from edge.models.rope import read_rotary
from edge.models.sparse_layers import check_routing
from edge.models.spec import MAX_LAYERS, ModelSpec


def describe(config: Config) -> ModelSpec:
    config = config.filled({"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5})
    count, experts = num_layers(config), experts_beside_shared(config)
    first = config.integer("first_k_dense_replace", 1)
    if not 0 <= first <= MAX_LAYERS:
        raise config.error(f"first_k_dense_replace must lie in 0..{MAX_LAYERS}, not {first}")
    return decoder(
        config,
        family="glm4_moe",
        rotaries=(read_rotary(config, head_size_of(config), partial=0.5),) * count,
        output_bias=False,
        mlp_bias=False,
        mixer={"query_key_norm": config.flag("use_qk_norm", False)},
        feed_forwards=[None if number < first else experts for number in range(count)],
    )


def experts_beside_shared(config: Config) -> Experts:
    """The experts of this family, and of DeepSeek's."""
    check_routing(config, scoring_func="sigmoid", topk_method="noaux_tc")
    columns = config.size("moe_intermediate_size", 1408)
    shared = config.size("n_shared_experts", 1, most=MAX_EXPERTS)
    local = config.values.get("n_routed_experts") is None and "num_local_experts" in config.values
    name = "num_local_experts" if local else "n_routed_experts"
    return Experts(
        num_experts=config.size(name, 128, most=MAX_EXPERTS),
        top_k=config.size("num_experts_per_tok", 8, most=MAX_EXPERTS),
        columns=columns,
        activation=activation(config),
        renormalized=config.flag("norm_topk_prob", True),
        shared=SharedExpert(columns=columns * shared, is_gated=False),
        scoring="sigmoid",
        has_correction=True,
        groups=config.size("n_group", 1, most=MAX_EXPERTS),
        chosen_groups=config.size("topk_group", 1, most=MAX_EXPERTS),
        least_sum=1e-20,
        weight_scale=config.positive("routed_scaling_factor", 1.0),
    )


def tensor_name(role: str) -> str:
    return llama_tensor_name(role).replace(".mlp.shared_expert.", ".mlp.shared_experts.")


FAMILY = Family(
    describe=describe, tensor_name=tensor_name, further_name=behind_the_last(tensor_name)
)
