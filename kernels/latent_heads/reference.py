"""Keys and values of heads from one product of a latent vector, and a part that keys share.

A key is the shared part, which turns with its position, followed by the head's own part
(DeepSeek-AI, DeepSeek-V2, 2024). Heads of keys are at least as large as those of values, which are
padded with zeros, so that both lie in a cache alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def latent_heads(product: Array, shared: Array, *, num_heads: int, own_size: int) -> Array:
    """product [..., num_heads · (own_size + value_size)], keys first; shared [..., n] → keys, then
    values [..., 2 · num_heads · (n + own_size)]."""
    leading, size = product.shape[:-1], shared.shape[-1] + own_size
    own, values = np.split(product, [num_heads * own_size], axis=-1)
    keys = np.empty((*leading, num_heads, size), np.float32)
    keys[..., : shared.shape[-1]] = shared[..., None, :]
    keys[..., shared.shape[-1] :] = own.reshape(*leading, num_heads, own_size)
    values = values.reshape(*leading, num_heads, -1)
    filled = np.zeros((*leading, num_heads, size), np.float32)
    filled[..., : values.shape[-1]] = values
    both = [each.reshape(*leading, -1) for each in (keys, filled)]
    return np.concatenate(both, axis=-1)
