"""Random weights of small shards, made in little time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def few_random_bytes() -> Iterator[None]:
    """Without the megabytes of random numbers that those of large shards begin with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.profiling.random_weights._BLOCK_BYTES", 1 << 18)
        yield
