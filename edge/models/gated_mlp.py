"""A gated feed-forward block: down(activation(gate(x)) · up(x))."""

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
    Rows,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    layer_number,
    whole_vector,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """A gated feed-forward block. A unit is a row of gate and of up, and a column of down."""

    kind: ClassVar[str] = "gated_mlp"

    columns: int
    activation: Activation
    bias: bool
    has_norm: bool = True
    """The input is normed."""
    has_post_norm: bool = False
    """The output is normed before it is added to the hidden state."""
    has_scale: bool = False
    """The hidden state is multiplied by a scale of the layer after the addition."""
    token_inputs: int | None = None
    """The size of the layer's inputs per token. After the block, the hidden state is gated by these
    inputs, and the result is added. None: the layer has none."""

    def __post_init__(self) -> None:
        check_sizes(ffn_columns=self.columns)
        check_flags(mlp_bias=self.bias, has_norm=self.has_norm)
        check_flags(has_post_norm=self.has_post_norm, has_scale=self.has_scale)
        if self.token_inputs is not None:
            check_sizes(token_inputs=self.token_inputs)
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {shown(self.activation)} is not one of {', '.join(ACTIVATIONS)}"
            )

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for role, rows, columns in (
            ("gate", self.columns, hidden_size),
            ("up", self.columns, hidden_size),
            ("down", hidden_size, self.columns),
        ):
            shapes[f"{role}.weight"] = (rows, columns)
            if self.bias:
                shapes[f"{role}.bias"] = (rows,)
        if self.has_norm:
            shapes["mlp_norm"] = (hidden_size,)
        if self.has_post_norm:
            shapes["mlp_post_norm"] = (hidden_size,)
        if self.has_scale:
            shapes["layer_scale"] = (1,)
        if self.token_inputs is not None:
            shapes["token_gate.weight"] = (self.token_inputs, hidden_size)
            shapes["token_output.weight"] = (hidden_size, self.token_inputs)
            shapes["token_post_norm"] = (hidden_size,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        has_tokens, inputs = self.token_inputs is not None, self.token_inputs or 0
        of_tokens = ("token_gate.weight", "token_output.weight", "token_projection")
        return PartWeights(
            unit=Weights(
                matrices=tuple((f"{role}.weight", hidden_size) for role in ("gate", "up", "down")),
                vector=2 * self.bias,
            ),
            fixed=Weights(
                matrices=tuple((role, inputs * hidden_size) for role in of_tokens if has_tokens),
                vector=hidden_size * (self.has_norm + self.has_post_norm + self.bias + has_tokens)
                + self.has_scale
                + inputs,
            ),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The outputs of gate and up, and their product; then the same for the token's inputs."""
        return max(3 * self.columns, 3 * (self.token_inputs or 0) + 2 * hidden_size)

    def of_units(self, units: range) -> GatedMlp | None:
        return dataclasses.replace(self, columns=len(units)) if units else None

    def with_columns(self, columns: int) -> GatedMlp:
        return dataclasses.replace(self, columns=columns)

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        hidden = range(hidden_size)
        if units:
            yield MatrixSlice(
                name=f"{layer}gate_up", parts=_fused(layer, "weight", units), columns=hidden
            )
            yield MatrixSlice(
                name=f"{layer}down", parts=((f"{layer}down.weight", hidden),), columns=units
            )
        if self.token_inputs is not None:  # computed by every shard, so that no sum is needed
            inputs = range(self.token_inputs)
            first = self.token_inputs * layer_number(layer)
            rows = range(first, first + self.token_inputs)
            yield MatrixSlice(
                name=f"{layer}token_projection", parts=(("token_projection", rows),), columns=hidden
            )
            gate, output = f"{layer}token_gate", f"{layer}token_output"
            yield MatrixSlice(name=gate, parts=((f"{gate}.weight", inputs),), columns=hidden)
            yield MatrixSlice(name=output, parts=((f"{output}.weight", hidden),), columns=inputs)

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if self.has_post_norm:
            yield whole_vector(f"{layer}mlp_post_norm", hidden_size)
        if self.has_scale:
            yield whole_vector(f"{layer}layer_scale", 1)
        if self.token_inputs is not None:
            norm = ("token_norm", range(self.token_inputs))
            yield VectorSlice(name=f"{layer}token_norm", parts=(norm,))
            yield whole_vector(f"{layer}token_post_norm", hidden_size)
        if not units:
            return
        if self.has_norm:
            yield whole_vector(f"{layer}mlp_norm", hidden_size)
        if self.bias:
            yield VectorSlice(name=f"{layer}gate_up.bias", parts=_fused(layer, "bias", units))
            if is_first:
                yield whole_vector(f"{layer}down.bias", hidden_size)


def _fused(layer: str, suffix: str, units: range) -> Rows:
    return (f"{layer}gate.{suffix}", units), (f"{layer}up.{suffix}", units)
