"""Bytes of a shard's packed weights that each token reads."""

from __future__ import annotations

from edge.models.experts import Experts, expert_number
from edge.models.parts import layer_number
from edge.weights.layout import ShardLayout
from edge.weights.recipe import Recipe


def packed_bytes_of_token(layout: ShardLayout, recipe: Recipe) -> int:
    """Packed bytes of all matrices of a shard, with only as many experts as a token uses."""
    total = 0.0
    for matrix in layout.matrices:
        packed = sum(each.packed_bytes for each in recipe.stored(matrix))
        if expert_number(matrix.name) is not None:
            part = layout.layer(layer_number(matrix.name)).feed_forward
            assert isinstance(part, Experts)
            packed *= part.top_k / part.num_experts
        total += packed
    return round(total)
