"""Weight formats whose matrices are all of one kind, whatever the model."""

from __future__ import annotations

from edge.weights.formats import WeightFormat, weight_format
from tests.support.specs import plain_spec

_ANY = plain_spec(num_layers=1, hidden_size=4, ffn_columns=4, vocab_size=4)


def uniform_format(name: str, block_size: int = 32, accuracy: str = "fast") -> WeightFormat:
    """ "int4" is 4 bits in all matrices."""
    return weight_format(_ANY, {"int4": "int4-pure"}.get(name, name), block_size, accuracy)
