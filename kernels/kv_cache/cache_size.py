"""Sizes of the KV cache of the CPU kernels, and of what is kept unrounded beside its codes."""

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


_GEMM_ROWS = 128
"""Keys that a product of weights and values sums up at once, for heads of 128 elements or more."""
_SMALLEST_STEP = 16


def kept_tokens(window: int, head_size: int, chunk_tokens: int, *, least: int = 1) -> int:
    """Rows of a buffer for a window (`WindowRows`), `least` or more, in which a row has the same
    bits wherever a request is cut into steps.

    Products with values sum up blocks of keys, counted from row 0, and their size grows for narrow
    heads: as ONNX Runtime's float products do (MLAS). So rows must move by whole blocks, unless all
    rows are one block.
    """
    block, columns = _GEMM_ROWS, _GEMM_ROWS
    while columns > _SMALLEST_STEP and columns // 2 >= head_size:
        block, columns = 2 * block, columns // 2

    def moving_by(step: int) -> int:
        return window - 1 + step * max(1, -(-(least - window + 1) // step))

    smallest = moving_by(_SMALLEST_STEP)
    return smallest if smallest + chunk_tokens <= block else moving_by(block)


NEWEST_TOKENS = 96
"""Tokens, the one that looks at them included, that are seen without rounding by 4 bits, as the
first token is. Simulated on a small model, the loss by rounding is 0.143 nats with none of them,
0.105 with the first, 0.0087 with 64 more and 0.0043 with 128 (rows `what ways to round keys and
values would cost`). With 64, it added 10.6 % to the loss of weights in int4; the aim is 10 %."""


def keeps_unrounded(bits: int | None) -> bool:
    """Whether the first and the newest tokens are kept unrounded beside the codes."""
    return bits == 4


def unrounded_shape(num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
    """Shape for one layer and request, float32: keys, then values, over the scales of their codes.

    Token 0 is in row 0, and token t of the newest in row 1 + t mod NEWEST_TOKENS.
    """
    return 2 * num_kv_heads, 1 + NEWEST_TOKENS, cache_head_size(head_size, 4)
