"""Grouped-query attention with rotary positions, over all tokens or the last ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    Rows,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    finite,
    whole_vector,
)
from partition import kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A unit is a query head; a shard holds the KV heads that its query heads read."""

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_size: int
    inverse_frequencies: tuple[float, ...]
    """Rotary angle per position, one for each pair of a head's elements."""
    window: int | None
    """How many last positions a query sees, itself included; None for all."""
    qkv_bias: bool
    output_bias: bool
    query_key_norm: bool
    """Each head of query and key is normed."""

    def __post_init__(self) -> None:
        check_sizes(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_size=self.head_size
        )
        check_flags(
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            query_key_norm=self.query_key_norm,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if not isinstance(self.inverse_frequencies, tuple | list):
            raise ValueError("inverse_frequencies must be a list of numbers")
        if self.head_size % 2 or len(self.inverse_frequencies) != self.head_size // 2:
            raise ValueError(f"head_size {self.head_size} needs one frequency for each pair")
        frequencies = tuple(map(finite, self.inverse_frequencies))
        object.__setattr__(self, "inverse_frequencies", frequencies)
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError("a sliding window must be at least 1 token")

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        query, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {}
        for role, rows, columns, has_bias in (
            ("query", query, hidden_size, self.qkv_bias),
            ("key", kv, hidden_size, self.qkv_bias),
            ("value", kv, hidden_size, self.qkv_bias),
            ("output", hidden_size, query, self.output_bias),
        ):
            shapes[f"{role}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{role}.bias"] = (rows,)
        shapes["attention_norm"] = (hidden_size,)
        if self.query_key_norm:
            shapes["query_norm"] = shapes["key_norm"] = (self.head_size,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        size = self.head_size
        head = size * hidden_size
        fixed = hidden_size * (1 + self.output_bias) + 2 * size * self.query_key_norm
        return PartWeights(
            unit=Weights(
                matrices=(("query.weight", head), ("output.weight", head)),
                vector=size * self.qkv_bias,
            ),
            group=Weights(
                matrices=(("key.weight", head), ("value.weight", head)),
                vector=2 * size * self.qkv_bias,
            ),
            fixed=Weights(vector=fixed),
        )

    def row_values(self, context_tokens: int) -> int:
        """The fused products, their parts turned and transposed, and the scores of every head over
        the whole context."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        return 2 * qkv + self.num_heads * context_tokens

    def of_units(self, units: range) -> Attention | None:
        if not units:
            return None
        return dataclasses.replace(
            self, num_heads=len(units), num_kv_heads=len(self._kv_heads(units))
        )

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        hidden = range(hidden_size)
        if units:
            yield MatrixSlice(
                name=f"{layer}qkv", parts=self._fused(layer, "weight", units), columns=hidden
            )
            yield MatrixSlice(
                name=f"{layer}output",
                parts=((f"{layer}output.weight", hidden),),
                columns=self._elements(units),
            )

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if not units:
            return
        yield whole_vector(f"{layer}attention_norm", hidden_size)
        if self.qkv_bias:
            yield VectorSlice(name=f"{layer}qkv.bias", parts=self._fused(layer, "bias", units))
        if self.query_key_norm:
            yield whole_vector(f"{layer}query_norm", self.head_size)
            yield whole_vector(f"{layer}key_norm", self.head_size)
        if self.output_bias and is_first:
            yield whole_vector(f"{layer}output.bias", hidden_size)

    def _fused(self, layer: str, suffix: str, units: range) -> Rows:
        """Queries, then keys, then values."""
        rows = [self._elements(range(head, head + 1)) for head in self._kv_heads(units)]
        return (
            (f"{layer}query.{suffix}", self._elements(units)),
            *((f"{layer}key.{suffix}", each) for each in rows),
            *((f"{layer}value.{suffix}", each) for each in rows),
        )

    def _kv_heads(self, units: range) -> tuple[int, ...]:
        return kv_heads(units, self.num_heads, self.num_kv_heads)

    def _elements(self, heads: range) -> range:
        return range(heads.start * self.head_size, heads.stop * self.head_size)
