"""A model's sizes for planning, from its description and its weight format. Pure."""

from __future__ import annotations

import numpy as np

from edge.models.spec import ModelSpec
from edge.protocol.wire_rules import Wire, number_bytes
from edge.weights.formats import KvDtype, WeightFormat, kv_bits
from kernels.kv_cache.cache_size import cache_row
from partition import ModelFacts

_FLOAT_BYTES = 4


def model_facts(
    spec: ModelSpec,
    weight_format: WeightFormat,
    *,
    name: str,
    embedding_itemsize: int,
    kv_dtype: KvDtype = "float32",
    wire: Wire = "float32",
) -> ModelFacts:
    """What each piece of the model weighs in a peer's memory, packed for its kernels.

    With `wire` "auto" hidden states count as float32, though some links may carry less.
    """
    weight = weight_format.packed_bytes_per_weight
    hidden, size = spec.hidden_size, spec.head_size
    biases = hidden * (spec.output_bias + spec.mlp_bias)
    kv_element, kv_elements = cache_row(size, kv_bits(kv_dtype))
    norms = 2 * hidden + (2 * size if spec.query_key_norm else 0)
    return ModelFacts(
        name=name,
        num_layers=spec.num_layers,
        hidden_size=hidden,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=size,
        ffn_columns=spec.ffn_columns,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        column_multiple=1 if weight_format.bits is None else weight_format.block_size,
        query_head_bytes=round(2 * size * hidden * weight) + size * _FLOAT_BYTES * spec.qkv_bias,
        kv_head_bytes=round(2 * size * hidden * weight) + 2 * size * _FLOAT_BYTES * spec.qkv_bias,
        ffn_column_bytes=round(3 * hidden * weight) + 2 * _FLOAT_BYTES * spec.mlp_bias,
        layer_bytes=(norms + biases) * _FLOAT_BYTES,
        embedding_row_bytes=hidden * embedding_itemsize,
        head_row_bytes=round(hidden * weight),
        wire_number_bytes=number_bytes(wire),
        kv_bytes_per_token=2 * kv_elements * np.dtype(kv_element).itemsize,
    )
