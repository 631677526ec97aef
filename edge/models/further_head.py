"""Further heads (multi-token prediction): a small model behind a model, which guesses on.

From the last hidden state of a token and the embedding of the token after it, a further head gets
the hidden state of the latter in one layer. Its own states are good enough to go on with.
DeepSeek-V3 (2024), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge.models.spec import ModelSpec

FURTHER_FAMILIES = (
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
"""Families whose checkpoints have further heads."""


def further_head(spec: ModelSpec) -> ModelSpec:
    """The further head of a model: its layer is like the last one with attention."""
    layer = replace(spec.layer(max(spec.attentions)), grade=0)
    return replace(
        spec,
        tied_embeddings=False,
        has_further_head=False,
        joins_states=True,
        kinds=(layer,),
        layers=(0,),
    )


_BEHIND = {
    "embedding": "embed_tokens.weight",
    "embedding_norm": "enorm.weight",
    "state_norm": "hnorm.weight",
    "input_projection": "eh_proj.weight",
    "final_norm": "shared_head.norm.weight",
    "head": "shared_head.head.weight",
}
_APART = {
    "embedding": "mtp.embed_tokens.weight",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "state_norm": "mtp.pre_fc_norm_hidden.weight",
    "input_projection": "mtp.fc.weight",
    "final_norm": "mtp.norm.weight",
    "head": "mtp.shared_head.head.weight",
}


def behind_the_last(tensor_name: Callable[[str], str]) -> Callable[[ModelSpec, str], str]:
    """Names of a head that is numbered as the layer behind the last. tensor_name: the family's."""

    def name(spec: ModelSpec, role: str) -> str:
        number = spec.num_layers
        if role in _BEHIND:
            return f"model.layers.{number}.{_BEHIND[role]}"
        return tensor_name(f"layers.{number}.{role.split('.', 2)[2]}")

    return name


def named_apart(tensor_name: Callable[[str], str]) -> Callable[[ModelSpec, str], str]:
    """Names of a head with a prefix of its own."""

    def name(spec: ModelSpec, role: str) -> str:
        return _APART.get(role) or f"mtp.{tensor_name(role).removeprefix('model.')}"

    return name
