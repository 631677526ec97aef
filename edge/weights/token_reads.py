"""How many bytes of a shard's weights a token is multiplied with, as kernels have them packed."""

from __future__ import annotations

from edge.models.experts import Experts, expert_number
from edge.models.parts import layer_number
from edge.weights.layout import ShardLayout
from edge.weights.recipe import Recipe


def packed_bytes_of_token(layout: ShardLayout, recipe: Recipe) -> int:
    """Packed bytes of all its matrices, but of a layer's experts as many as a token uses."""
    total = 0.0
    for matrix in layout.matrices:
        packed = sum(each.packed_bytes for each in recipe.stored(matrix))
        if expert_number(matrix.name) is not None:
            part = layout.layer(layer_number(matrix.name)).feed_forward
            assert isinstance(part, Experts)
            packed *= part.top_k / part.num_experts
        total += packed
    return round(total)
