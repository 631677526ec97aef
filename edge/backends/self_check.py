"""Before a shard is used: does this device compute what the reference computes?

Drivers, compilers, kernels and processors have bugs, and a shard that computes nonsense spoils
every reply without a word. So the operators of a shard get known input when it is loaded, few rows
and more, and what they give is compared with the formulas in numpy. What all back ends need of it
is here. Pure, but for reading the shard's file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, RequestError
from edge.kernels.attention.reference import attention
from edge.kernels.rms_norm.reference import rms_norm
from edge.kernels.rope.reference import rope
from edge.models.attention import Attention

ROWS = (1, 5)
"""Products of few rows and of more have kernels of their own."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Who computed, and what to do if it is wrong."""

    backend: str
    device_name: str
    remedy: str

    def compare(self, operator: str, found: Array, expected: Array, *, allowed: float) -> None:
        """Raises RequestError if the largest error exceeds so much of the largest value.

        CheckpointError where the reference gives no numbers: whoever computes, it is the weights.
        """
        if not np.isfinite(expected).all():
            raise CheckpointError(
                f"the weights of {operator} give NaN or infinity whoever computes with them: the "
                "checkpoint is damaged, fetch it again"
            )
        found = found.reshape(expected.shape)
        error = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-9))
        if not error <= allowed:  # NaN is no agreement either
            raise RequestError(
                f"back end {self.backend} computes wrongly on this device ({self.device_name}): "
                f"{operator} errs by {error:.2g} of its largest value, and {allowed:.2g} is "
                "allowed",
                remedy=self.remedy,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Queries, keys and values [tokens, heads, head_size] of a packed product, normed and rotated.

    They begin at position 0.
    """

    query: Array
    keys: Array
    values: Array

    def attend(self, first: int, end: int, part: Attention, sinks: Array | None = None) -> Array:
        """What the tokens `first` … `end` − 1 make of all up to themselves: [tokens, elements]."""
        mixed = attention(
            self.query[first:end],
            self.keys[:end],
            self.values[:end],
            position=first,
            scale=part.score_scale,
            window=part.window,
            soft_cap=part.soft_cap,
            sinks=sinks,
        )
        return mixed.reshape(end - first, -1)


def heads_of(
    qkv: Array,
    part: Attention,
    tables: tuple[Array, Array],
    *,
    norms: tuple[Array, Array] | None,
    epsilon: float,
) -> Heads:
    """qkv [tokens, heads, head_size], queries first; tables as `rope_tables` makes them."""
    heads = part.num_heads
    query, keys, values = np.split(qkv, [heads, heads + part.num_kv_heads], axis=1)
    if norms is not None:
        query, keys = (
            rms_norm(x.reshape(len(x), -1, weight.size), weight, epsilon=epsilon).reshape(x.shape)
            for x, weight in zip((query, keys), norms, strict=True)
        )
    if part.value_norm:
        values = rms_norm(values, np.ones(part.head_size, np.float32), epsilon=epsilon)
    cos, sin = (table[: len(qkv)] for table in tables)
    turned = (rope(x, cos, sin, interleaved=part.rotary.is_interleaved) for x in (query, keys))
    return Heads(query=next(turned), keys=next(turned), values=values)


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of the first `count` numbers, the ends among them."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, most).astype(np.int64))]
