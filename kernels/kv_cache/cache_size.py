"""Bytes of one token's key or value in the KV cache of the CPU kernels."""

import numpy as np

_HEAD_MULTIPLE = {None: 8, 8: 16, 4: 16}
"""GroupQueryAttention takes only multiples of this; other heads are padded with zeros.

By the bits of its cache, as everywhere here: None is float32, 8 and 4 are `channel_cache.py`'s
codes.
"""

_DTYPES: dict[int | None, type[np.generic]] = {None: np.float32, 8: np.int8, 4: np.uint8}


def cache_head_size(head_size: int, bits: int | None = None) -> int:
    """Channels of one head in the KV cache."""
    multiple = _HEAD_MULTIPLE[bits]
    return -(-head_size // multiple) * multiple


def cache_row(head_size: int, bits: int | None = None) -> tuple[type[np.generic], int]:
    """(dtype, elements) of one token's key, or value, of one head in the KV cache."""
    channels = cache_head_size(head_size, bits)
    return _DTYPES[bits], channels // 2 if bits == 4 else channels
