"""The codes of a KV cache of 8 or 4 bits in which each token has its own scales: formulas.

What is written needs no knowledge of other tokens. Each group of a head's elements has a scale:

    scale = peak / L,  code = ⌊x / scale + 1/2⌋,  x ≈ code · scale

peak is the largest magnitude of the group; L is 127 with 8 bits and 7 with 4. 8 bits: int8 codes.
4 bits: uint8, code + 8, the even element in the low nibble. A group of zeros has the scale 0 and
the codes 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

LARGEST_CODE = {8: 127, 4: 7}


def quantize_heads(x: Array, *, bits: int, group_size: int) -> tuple[NDArray[Any], Array]:
    """x [..., head_size] → (codes [..., head_size · bits / 8], scales [..., groups])."""
    if bits not in LARGEST_CODE:
        raise ValueError(f"a KV cache of {bits} bits is not supported; choose from 8 and 4")
    head_size = x.shape[-1]
    if head_size % group_size or (bits == 4 and head_size % 2):
        raise ValueError(f"heads of {head_size} do not divide into groups of {group_size}")
    groups = x.reshape(*x.shape[:-1], head_size // group_size, group_size).astype(np.float32)
    scales = np.abs(groups).max(axis=-1) / np.float32(LARGEST_CODE[bits])
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.floor(groups * inverse[..., None] + np.float32(0.5)).astype(np.int8)
    codes = codes.reshape(x.shape)
    if bits == 8:
        return codes, scales
    unsigned = (codes + 8).astype(np.uint8)
    return unsigned[..., 0::2] | unsigned[..., 1::2] << np.uint8(4), scales


def dequantize_heads(codes: NDArray[Any], scales: Array) -> Array:
    """The numbers of codes: float32 [..., head_size]; uint8 codes are of 4 bits."""
    if codes.dtype == np.uint8:
        unpacked = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - np.int8(8)
        codes = unpacked.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    group_size = codes.shape[-1] // scales.shape[-1]
    return codes.astype(np.float32) * np.repeat(scales, group_size, axis=-1)
