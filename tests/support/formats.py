"""Weight formats whose matrices are all of one kind, whatever the model."""

from __future__ import annotations

from edge.models.attention import Attention
from edge.models.gated_mlp import GatedMlp
from edge.models.spec import LayerSpec, ModelSpec, by_kind
from edge.weights.formats import DEFAULT_BLOCK_SIZE, WeightFormat, weight_format

_ANY = ModelSpec(
    family="any",
    hidden_size=4,
    vocab_size=4,
    context_tokens=4,
    norm_epsilon=1e-5,
    tied_embeddings=False,
    **by_kind(
        [
            LayerSpec(
                mixer=Attention(
                    num_heads=1,
                    num_kv_heads=1,
                    head_size=4,
                    inverse_frequencies=(1.0, 0.5),
                    window=None,
                    qkv_bias=False,
                    output_bias=False,
                    query_key_norm=False,
                ),
                feed_forward=GatedMlp(columns=4, activation="silu", bias=False),
            )
        ]
    ),
)


def uniform_format(
    name: str, block_size: int = DEFAULT_BLOCK_SIZE, accuracy: str = "fast"
) -> WeightFormat:
    """ "int4" is 4 bits in all matrices."""
    return weight_format(_ANY, {"int4": "int4-pure"}.get(name, name), block_size, accuracy)
