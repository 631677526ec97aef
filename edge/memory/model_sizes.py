"""A model's sizes for planning, from its description and its weight format. Pure."""

from __future__ import annotations

from edge.memory.step_memory import row_bytes
from edge.models.parts import Weights
from edge.models.spec import ModelSpec
from edge.protocol.wire_rules import Wire, number_bytes
from edge.weights.formats import KvDtype, WeightFormat
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
    layer = spec.kinds[0]
    mixer, feed_forward = layer.mixer, layer.feed_forward
    hidden = spec.hidden_size
    attention, mlp = mixer.weights(hidden), feed_forward.weights(hidden)

    def nbytes(weights: Weights) -> int:
        matrix_bytes = round(weights.matrix * weight_format.packed_bytes_per_weight)
        return matrix_bytes + _FLOAT_BYTES * weights.vector

    return ModelFacts(
        name=name,
        num_layers=spec.num_layers,
        hidden_size=hidden,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_size=mixer.head_size,
        ffn_columns=feed_forward.columns,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        column_multiple=1 if weight_format.bits is None else weight_format.block_size,
        query_head_bytes=nbytes(attention.unit),
        kv_head_bytes=nbytes(attention.group),
        ffn_column_bytes=nbytes(mlp.unit),
        layer_bytes=nbytes(attention.fixed) + nbytes(mlp.fixed),
        embedding_row_bytes=hidden * embedding_itemsize,
        head_row_bytes=nbytes(Weights(matrix=hidden)),
        wire_number_bytes=number_bytes(wire),
        kv_bytes_per_token=2 * row_bytes(mixer, kv_dtype),
    )
