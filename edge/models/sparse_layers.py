"""The layers with experts, in the config.json fields of families after Qwen2-MoE."""

from __future__ import annotations

from collections.abc import Sequence

from edge.models.config import Config
from edge.models.decoder import activation, num_layers
from edge.models.experts import MAX_EXPERTS, Experts, SharedExpert
from edge.models.spec import MAX_LAYERS


def num_experts(config: Config) -> int:
    """The number of experts, under either of its two names."""
    has_local = config.values.get("num_experts") is None
    name = "num_local_experts" if has_local and "num_local_experts" in config.values else ""
    return config.size(name or "num_experts", most=MAX_EXPERTS)


def check_routing(config: Config, **known: str) -> None:
    """Raises CheckpointError unless these fields have the family's only values."""
    for name, value in known.items():
        if config.values.get(name, value) != value:
            raise config.error(f"{name} must be {value}, which is what this family computes")


def shared_expert(config: Config, usual: int) -> SharedExpert:
    """The shared expert of Qwen's families. usual: the default of its columns."""
    columns = config.size("shared_expert_intermediate_size", usual)
    return SharedExpert(columns=columns, is_gated=True)


def sparse_layers(
    config: Config, *, renormalized: bool = False, shared: SharedExpert | None = None
) -> Sequence[Experts | None]:
    """The experts of each layer; None for a plain block. renormalized: the default."""
    check_routing(config, scoring_func="softmax", topk_method="greedy")
    experts = Experts(
        num_experts=num_experts(config),
        top_k=config.size("num_experts_per_tok", most=MAX_EXPERTS),
        columns=config.size("moe_intermediate_size"),
        activation=activation(config),
        renormalized=config.flag("norm_topk_prob", renormalized),
        shared=shared,
    )
    step = config.size("decoder_sparse_step", 1, most=MAX_LAYERS)
    plain = config.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(each) is not int for each in plain):
        raise config.error("mlp_only_layers must be a list of numbers of layers")
    return tuple(
        None if number in plain or (number + 1) % step else experts
        for number in range(num_layers(config))
    )
