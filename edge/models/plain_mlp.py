"""A feed-forward block without a gate: down(activation(up(x)))."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from edge.errors import shown
from edge.kernels.activation.reference import ACTIVATIONS, Activation
from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    whole_vector,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp:
    """A feed-forward block without a gate. A unit is a row of up, and a column of down."""

    kind: ClassVar[str] = "plain_mlp"

    columns: int
    activation: Activation
    bias: bool
    norm_bias: bool = False
    """The input's norm is a LayerNorm: it subtracts the mean and adds a bias."""

    def __post_init__(self) -> None:
        check_sizes(ffn_columns=self.columns)
        check_flags(mlp_bias=self.bias, norm_bias=self.norm_bias)
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {shown(self.activation)} is not one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def has_norm(self) -> bool:
        return True

    @property
    def has_post_norm(self) -> bool:
        return False

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for role, rows, columns in (
            ("up", self.columns, hidden_size),
            ("down", hidden_size, self.columns),
        ):
            shapes[f"{role}.weight"] = (rows, columns)
            if self.bias:
                shapes[f"{role}.bias"] = (rows,)
        shapes["mlp_norm"] = (hidden_size,)
        if self.norm_bias:
            shapes["mlp_norm_bias"] = (hidden_size,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        return PartWeights(
            unit=Weights(
                matrices=tuple((f"{role}.weight", hidden_size) for role in ("up", "down")),
                vector=int(self.bias),
            ),
            fixed=Weights(vector=hidden_size * (1 + self.norm_bias + self.bias)),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The output of up with its bias, and its activation."""
        return 3 * self.columns

    def of_units(self, units: range) -> PlainMlp | None:
        return dataclasses.replace(self, columns=len(units)) if units else None

    def with_columns(self, columns: int) -> PlainMlp:
        return dataclasses.replace(self, columns=columns)

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        hidden = range(hidden_size)
        if units:
            up, down = ((f"{layer}up.weight", units),), ((f"{layer}down.weight", hidden),)
            yield MatrixSlice(name=f"{layer}up", parts=up, columns=hidden)
            yield MatrixSlice(name=f"{layer}down", parts=down, columns=units)

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if not units:
            return
        yield whole_vector(f"{layer}mlp_norm", hidden_size)
        if self.norm_bias:
            yield whole_vector(f"{layer}mlp_norm_bias", hidden_size)
        if self.bias:
            yield VectorSlice(name=f"{layer}up.bias", parts=((f"{layer}up.bias", units),))
            if is_first:
                yield whole_vector(f"{layer}down.bias", hidden_size)
