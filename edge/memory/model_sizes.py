"""A model's sizes for planning, from its description and its weight format. Pure."""

from __future__ import annotations

from edge.memory.step_memory import row_bytes
from edge.models.parts import Weights
from edge.models.spec import LayerSpec, ModelSpec
from edge.protocol.wire_rules import Wire, number_bytes
from edge.weights.formats import KvDtype, WeightFormat
from partition import LayerFacts, ModelFacts

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
    hidden = spec.hidden_size

    def nbytes(weights: Weights) -> int:
        matrix_bytes = round(weights.matrix * weight_format.kind.packed_bytes_per_weight)
        return matrix_bytes + _FLOAT_BYTES * weights.vector

    def facts(layer: LayerSpec) -> LayerFacts:
        mixer, feed_forward = layer.mixer.weights(hidden), layer.feed_forward.weights(hidden)
        return LayerFacts(
            num_heads=layer.mixer.num_heads,
            num_kv_heads=layer.mixer.num_kv_heads,
            ffn_columns=layer.feed_forward.columns,
            query_head_bytes=nbytes(mixer.unit),
            kv_head_bytes=nbytes(mixer.group),
            ffn_column_bytes=nbytes(feed_forward.unit),
            layer_bytes=nbytes(mixer.fixed) + nbytes(feed_forward.fixed),
            kv_bytes_per_token=2 * row_bytes(layer.mixer, kv_dtype),
        )

    return ModelFacts(
        name=name,
        hidden_size=hidden,
        vocab_size=spec.vocab_size,
        kinds=tuple(map(facts, spec.kinds)),
        layers=spec.layers,
        tied_embeddings=spec.tied_embeddings,
        column_multiple=weight_format.kind.column_multiple,
        embedding_row_bytes=hidden * embedding_itemsize,
        head_row_bytes=nbytes(Weights(matrix=hidden)),
        wire_number_bytes=number_bytes(wire),
    )
