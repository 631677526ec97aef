"""A short gated convolution, whose state is the last few inputs in place of a KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from edge.models.linear_attention import MAX_CONVOLUTION
from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    Rows,
    VectorSlice,
    Weights,
    check_flags,
    check_sizes,
    whole_vector,
)

_MATRICES = ("short_before", "short_after", "short_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A short gated convolution. A unit is a group of channels."""

    kind: ClassVar[str] = "short_convolution"
    state_names: ClassVar[tuple[str, ...]] = ("channels",)
    output_name: ClassVar[str] = "short_output"

    num_units: int
    unit_channels: int
    """Channels of each unit."""
    convolution: int
    """The window in tokens."""
    bias: bool

    def __post_init__(self) -> None:
        check_sizes(
            num_units=self.num_units,
            unit_channels=self.unit_channels,
            convolution=self.convolution,
        )
        check_flags(convolution_bias=self.bias)
        if not 2 <= self.convolution <= MAX_CONVOLUTION:
            raise ValueError(f"a convolution sees 2 to {MAX_CONVOLUTION} tokens")

    @property
    def has_post_norm(self) -> bool:
        return False

    @property
    def num_groups(self) -> int:
        """The number of groups of units that share weights: each unit is its own."""
        return self.num_units

    @property
    def channels(self) -> int:
        return self.num_units * self.unit_channels

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of one request's state, float32: the last inputs."""
        return ((self.convolution - 1, self.channels),)

    @property
    def state_units(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """See `LinearAttention.state_units`."""
        return ((1, (self.unit_channels,)),)

    @property
    def state_values(self) -> int:
        return (self.convolution - 1) * self.channels

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name in _MATRICES:
            shapes[f"{name}.weight"] = (self.channels, hidden_size)
            if self.bias:
                shapes[f"{name}.bias"] = (self.channels,)
        shapes["short_output.weight"] = (hidden_size, self.channels)
        shapes["short_convolution"] = (self.channels, 1, self.convolution)
        if self.bias:
            shapes["short_output.bias"] = (hidden_size,)
            shapes["short_convolution_bias"] = (self.channels,)
        shapes["attention_norm"] = (hidden_size,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        matrix = self.unit_channels * hidden_size
        return PartWeights(
            unit=Weights(
                matrices=tuple((f"{name}.weight", matrix) for name in (*_MATRICES, "short_output")),
                vector=self.unit_channels * (self.convolution + 4 * self.bias),
            ),
            fixed=Weights(vector=hidden_size * (1 + self.bias)),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The fused product, its parts, and their products."""
        return 9 * self.channels

    def of_units(self, units: range) -> ShortConvolution | None:
        return dataclasses.replace(self, num_units=len(units)) if units else None

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        if not units:
            return
        hidden = range(hidden_size)
        fused = self._fused(layer, "weight", units)
        yield MatrixSlice(name=f"{layer}short", parts=fused, columns=hidden)
        output = ((f"{layer}short_output.weight", hidden),)
        columns = self._channels(units)
        yield MatrixSlice(name=f"{layer}short_output", parts=output, columns=columns)

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if not units:
            return
        channels, role = self._channels(units), f"{layer}short_convolution"
        yield whole_vector(f"{layer}attention_norm", hidden_size)
        yield VectorSlice(name=role, parts=((role, channels),), row_size=self.convolution)
        if not self.bias:
            return
        yield VectorSlice(name=f"{layer}short.bias", parts=self._fused(layer, "bias", units))
        yield VectorSlice(name=f"{role}_bias", parts=((f"{role}_bias", channels),))
        if is_first:
            yield whole_vector(f"{layer}short_output.bias", hidden_size)

    def _fused(self, layer: str, suffix: str, units: range) -> Rows:
        channels = self._channels(units)
        return tuple((f"{layer}{name}.{suffix}", channels) for name in _MATRICES)

    def _channels(self, units: range) -> range:
        return range(units.start * self.unit_channels, units.stop * self.unit_channels)
