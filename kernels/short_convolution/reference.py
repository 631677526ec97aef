"""after · convolution(before · x): a causal convolution of each channel by itself, over a few last
tokens (Liquid AI, LFM2, 2025).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def short_convolution(
    mixed: Array, past: Array, convolution: Array, bias: Array | None = None
) -> tuple[Array, Array]:
    """(output [tokens, c], what is past after these tokens).

    mixed [tokens, 3 · c]: before, after and x; past: the last before · x [width − 1, c], zeros at
    first; convolution [c, width] or flat, bias [c].
    """
    before, after, x = np.split(mixed, 3, axis=-1)
    convolution = convolution.reshape(x.shape[-1], -1)
    seen = np.concatenate([past, (before * x)]).astype(np.float64)
    count, width = len(x), convolution.shape[1]
    mixed = np.sum([seen[tap : tap + count] * convolution[:, tap] for tap in range(width)], axis=0)
    if bias is not None:
        mixed += bias
    last = seen[len(seen) - width + 1 :].astype(np.float32)
    return (after * mixed).astype(np.float32), last
