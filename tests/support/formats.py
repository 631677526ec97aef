"""Weight formats whose matrices are all of one kind, whatever the model; and few random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edge.weights.formats import WeightFormat, weight_format
from tests.support.specs import plain_spec

_ANY = plain_spec(num_layers=1, hidden_size=4, ffn_columns=4, vocab_size=4)


def uniform_format(name: str, block_size: int = 32, accuracy: str = "fast") -> WeightFormat:
    """ "int4" is 4 bits in all matrices."""
    return weight_format(_ANY, {"int4": "int4-pure"}.get(name, name), block_size, accuracy)


@contextmanager
def few_random_bytes() -> Iterator[None]:
    """Random weights of small shards, without the megabytes of them that large ones begin with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.profiling.random_weights._BLOCK_BYTES", 1 << 18)
        yield
