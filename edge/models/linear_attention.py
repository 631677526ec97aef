"""Linear attention by the gated delta rule: a state of fixed size in place of a KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from edge.models.parts import (
    MatrixSlice,
    PartWeights,
    VectorSlice,
    Weights,
    check_sizes,
    whole_vector,
)

MAX_CONVOLUTION = 64
"""Most tokens in the convolution's window; models have 4."""

_MATRICES = ("query", "key", "value", "gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Linear attention. A unit is a key head with its query head and its value heads."""

    kind: ClassVar[str] = "linear_attention"
    state_names: ClassVar[tuple[str, ...]] = ("channels", "state")
    """The names of the states in `state_shapes`."""
    output_name: ClassVar[str] = "linear_output"

    num_key_heads: int
    num_value_heads: int
    key_size: int
    """Elements of a head of query or key."""
    value_size: int
    convolution: int
    """The window, in tokens, of the depthwise convolution before the heads."""

    def __post_init__(self) -> None:
        check_sizes(
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_size=self.key_size,
            value_size=self.value_size,
            convolution=self.convolution,
        )
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads ({self.num_value_heads}) must be a multiple of num_key_heads "
                f"({self.num_key_heads})"
            )
        if not 2 <= self.convolution <= MAX_CONVOLUTION:
            raise ValueError(f"a convolution sees 2 to {MAX_CONVOLUTION} tokens")

    @property
    def has_post_norm(self) -> bool:
        return False

    @property
    def num_units(self) -> int:
        return self.num_key_heads

    @property
    def num_groups(self) -> int:
        """The number of groups of units that share weights: each unit is its own."""
        return self.num_key_heads

    @property
    def value_heads(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of one request's states, float32: the convolution's last inputs, and the state
        of each value head."""
        return (
            (self.convolution - 1, self.channels),
            (self.num_value_heads, self.key_size, self.value_size),
        )

    @property
    def state_units(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For each state, the axis that is divided into units, and the elements that a unit has in
        each section of it."""
        channels = self.key_size, self.key_size, self.value_heads * self.value_size
        return (1, channels), (0, (self.value_heads,))

    @property
    def state_values(self) -> int:
        """The number of elements of both states."""
        recurrent = self.num_value_heads * self.key_size * self.value_size
        return (self.convolution - 1) * self.channels + recurrent

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        key, value = self.num_key_heads * self.key_size, self.num_value_heads * self.value_size
        shapes: dict[str, tuple[int, ...]] = {
            f"linear_{name}.weight": (rows, hidden_size)
            for name, rows in zip(_MATRICES, (key, key, value, value), strict=True)
        }
        shapes["linear_decay.weight"] = (self.num_value_heads, hidden_size)
        shapes["linear_beta.weight"] = (self.num_value_heads, hidden_size)
        shapes["linear_output.weight"] = (hidden_size, value)
        shapes["linear_convolution"] = (self.channels, 1, self.convolution)
        shapes["linear_decay_bias"] = shapes["linear_decay_rate"] = (self.num_value_heads,)
        shapes["linear_scale"] = (self.value_size,)
        shapes["attention_norm"] = (hidden_size,)
        return shapes

    def weights(self, hidden_size: int) -> PartWeights:
        key, value = self.key_size * hidden_size, self.value_heads * self.value_size * hidden_size
        beta = self.value_heads * hidden_size
        sizes = {"query": key, "key": key, "value": value, "gate": value, "output": value}
        sizes |= {"decay": beta, "beta": beta}
        channels = self.channels // self.num_key_heads
        return PartWeights(
            unit=Weights(
                matrices=tuple((f"linear_{name}.weight", size) for name, size in sizes.items()),
                vector=channels * self.convolution + 2 * self.value_heads,
            ),
            fixed=Weights(vector=hidden_size + self.value_size),
        )

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The fused products, the channels before and behind the convolution and apart, normed
        heads, and what is gated."""
        values = self.num_value_heads * self.value_size
        return 5 * self.channels + 4 * values + 6 * self.num_value_heads

    def of_units(self, units: range) -> LinearAttention | None:
        if not units:
            return None
        return dataclasses.replace(
            self, num_key_heads=len(units), num_value_heads=len(units) * self.value_heads
        )

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        if not units:
            return
        hidden, heads, keys, values = range(hidden_size), *self._rows(units)
        rows = (keys, keys, values, values)
        yield MatrixSlice(
            name=f"{layer}linear",
            parts=tuple(
                (f"{layer}linear_{name}.weight", each)
                for name, each in zip(_MATRICES, rows, strict=True)
            ),
            columns=hidden,
        )
        yield MatrixSlice(
            name=f"{layer}linear_gates",
            parts=(
                (f"{layer}linear_decay.weight", heads),
                (f"{layer}linear_beta.weight", heads),
            ),
            columns=hidden,
        )
        output = ((f"{layer}linear_output.weight", hidden),)
        yield MatrixSlice(name=f"{layer}linear_output", parts=output, columns=values)

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        if not units:
            return
        heads, keys, values = self._rows(units)
        all_keys = self.num_key_heads * self.key_size
        yield whole_vector(f"{layer}attention_norm", hidden_size)
        role = f"{layer}linear_convolution"
        yield VectorSlice(
            name=role,
            parts=tuple(
                (role, range(first + rows.start, first + rows.stop))
                for first, rows in ((0, keys), (all_keys, keys), (2 * all_keys, values))
            ),
            row_size=self.convolution,
        )
        for name in ("linear_decay_bias", "linear_decay_rate"):
            yield VectorSlice(name=f"{layer}{name}", parts=((f"{layer}{name}", heads),))
        yield whole_vector(f"{layer}linear_scale", self.value_size)

    def _rows(self, units: range) -> tuple[range, range, range]:
        """The value heads of these units, the rows of their queries or keys, and of their
        values."""
        heads = range(units.start * self.value_heads, units.stop * self.value_heads)
        return (
            heads,
            range(units.start * self.key_size, units.stop * self.key_size),
            range(heads.start * self.value_size, heads.stop * self.value_size),
        )
