"""A small GGUF model, byte by byte, with a matrix of every type that is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support import gguf_bytes
from tests.support.gguf_files import Type, raw_blocks

_HIDDEN, _FFN, _HEAD, _LAYERS = 256, 32, 16, 2
_WIDE = (
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS),
    *(Type.F16, Type.BF16, Type.Q8_0, Type.MXFP4, Type.Q4_K, Type.Q3_K),
)
"""Of rows that are whole blocks of 256; and `_NARROW` of those that are not."""
_NARROW = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)

METADATA: Mapping[str, Any] = {
    **gguf_bytes.METADATA,
    "llama.block_count": _LAYERS,
    "llama.embedding_length": _HIDDEN,
    "llama.feed_forward_length": _FFN,
    "llama.attention.key_length": _HEAD,
    "llama.attention.value_length": _HEAD,
    "llama.rope.dimension_count": _HEAD,
}


def placed() -> tuple[list[list[Any]], bytes]:
    """Descriptions of its tensors, and their bytes."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (gguf_bytes.VOCABULARY, _HIDDEN),
        "output.weight": (gguf_bytes.VOCABULARY, _HIDDEN),
        "output_norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "attn_q": (2 * _HEAD, _HIDDEN),
            "attn_k": (_HEAD, _HIDDEN),
            "attn_v": (_HEAD, _HIDDEN),
            "ffn_gate": (_FFN, _HIDDEN),
            "ffn_up": (_FFN, _HIDDEN),
            "attn_output": (_HIDDEN, 2 * _HEAD),
            "ffn_down": (_HIDDEN, _FFN),
            "attn_norm": (_HIDDEN,),
            "ffn_norm": (_HIDDEN,),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    wide, narrow = iter(_WIDE), iter(_NARROW)
    chance = np.random.default_rng(0)
    found = {}
    for place, (name, shape) in enumerate(shapes.items()):
        kind = Type.F32
        if len(shape) == 2:
            kind = (
                Type.IQ4_NL
                if name == "output.weight"
                else next(wide if shape[1] == _HIDDEN else narrow)
            )
        values = chance.uniform(0.5, 1.5, shape).astype(np.float32)
        content = np.asarray(raw_blocks(values, kind, seed=place)).tobytes()
        found[name] = shape, int(kind), content
    return gguf_bytes.placed_bytes(found)
