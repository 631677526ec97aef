"""softmax(scale · q·rᵀ + mask)·r, with rows r that all heads share.

A row is a latent vector, and elements that turn with its position. A head's query for rows is its
query times the matrix that makes its keys of latent vectors, and its elements that turn; its value
is the mix of latent vectors times the matrix of its values (DeepSeek-AI, DeepSeek-V2, 2024). Halves
of a row lie in the places of a key and of a value in a cache, with zeros at their ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.kernels.attention.reference import attention
from edge.kernels.kv_cache.cache_size import cache_head_size

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """The sizes of latent attention, and the scale of its scores."""

    num_heads: int
    row_size: int
    scale: float

    @property
    def half_size(self) -> int:
        """Elements of half a row in a cache."""
        return cache_head_size(-(-self.row_size // 2))

    @property
    def filled_size(self) -> int:
        """Elements of a row, or of a query for rows, with the zeros at its end."""
        return 2 * self.half_size

    def node_values(self, rows: int, context_tokens: int) -> int:
        """Values alive at once where nodes attend: scores twice, and the rows that tokens see."""
        return (rows * (2 * self.num_heads + 2) + self.filled_size) * context_tokens


def latent_attention(queries: Array, rows: Array, *, form: LatentForm) -> Array:
    """queries [tokens, num_heads · filled_size] of the last tokens; rows [all tokens, filled_size]
    → like queries."""
    shared = rows[:, None]
    query = queries.reshape(len(queries), form.num_heads, form.filled_size)
    position = len(rows) - len(queries)
    mixed = attention(query, shared, shared, position=position, scale=form.scale)
    return mixed.reshape(len(queries), -1)
