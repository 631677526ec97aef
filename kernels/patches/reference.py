"""Patches of a tile: y = (pixel · scale + shift) · Wᵀ, and blocks of patches joined to rows.

Patches of a block of side · side stand one after the other, row by row. Joined by "patches" they
are one row; by "channels" the row has the values of channel 0 of all patches, then of channel 1;
by "mean" they are averaged.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def embed(
    pixels: NDArray[np.uint8],
    weight: Array,
    scale: Array,
    shift: Array,
    *,
    frames: int = 1,
    frames_apart: bool = False,
    channels_last: bool = False,
) -> Array:
    """pixels [batch, patches, (channel, y, x)]; scale, shift [channels, 1] → [batch, patches, n].

    weight [n, (channel, frame, y, x)], with frames_apart [frame, n, (channel, y, x)], or with
    channels_last [n, (y, x, channel)]. A picture gives all frames the same pixels.
    """
    channels, (batch, patches, elements) = len(scale), pixels.shape
    values = pixels.reshape(batch, patches, channels, -1).astype(np.float64)
    values = values * scale.reshape(-1, 1) + shift.reshape(-1, 1)
    if frames_apart:
        weight = weight.sum(axis=0, dtype=np.float64)
        rows = weight.reshape(len(weight), channels, -1)
    elif channels_last:
        rows = weight.reshape(len(weight), -1, channels).swapaxes(1, 2)
    else:
        rows = weight.reshape(len(weight), channels, frames, -1).sum(axis=2, dtype=np.float64)
    found: Array = (values.reshape(batch, patches, elements) @ rows.reshape(-1, elements).T).astype(
        np.float32
    )
    return found


def join(x: Array, *, block: int, joining: str) -> Array:
    """x [batch, rows · block, n] → [batch, rows, block · n], or [batch, rows, n] of means."""
    blocks = x.reshape(len(x), -1, block, x.shape[-1])
    if joining == "mean":
        means: Array = blocks.mean(axis=2, dtype=np.float64).astype(np.float32)
        return means
    if joining == "channels":
        blocks = blocks.swapaxes(2, 3)
    return np.ascontiguousarray(blocks).reshape(len(x), -1, block * x.shape[-1])
