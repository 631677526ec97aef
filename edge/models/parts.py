"""Parts: the halves of a layer as data, whatever they compute; and slices of weights.

A layer is a mixer, which looks at other tokens, and a feed-forward block, which does not. Both read
the hidden state, and what they make is added to it; either may be normed. Both are shared out in
units (heads, columns), and some units of a part are a smaller part of the same kind: what produces
units is cut by rows and what consumes them by columns, so one sum after each part is all a layer
needs (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

from edge.errors import shown

MAX_SIZE = 1 << 24
"""No dimension of a model is larger than this; a larger one is a damaged file or a hostile peer."""

_LARGEST_NUMBER = 1e38
"""Float32 ends there."""

_Made = TypeVar("_Made")

Rows = tuple[tuple[str, range], ...]
"""(role, rows) of whole weights, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSlice:
    """Rows of one or more weight matrices on top of each other, or columns of one matrix."""

    name: str
    parts: Rows
    """Rows index the whole matrix."""
    columns: range
    """Columns of the whole matrix; all of them for a slice by rows."""
    grade: int = 0
    """Grade of its layer; see LayerSpec."""

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _role, rows in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSlice:
    """Pieces of weights, each flat, one after the other."""

    name: str
    parts: Rows
    row_size: int = 1
    """Elements in each row; more for weights that are no vectors in the checkpoint."""

    @property
    def num_elements(self) -> int:
        return self.row_size * sum(len(rows) for _role, rows in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How many weights something has."""

    matrices: tuple[tuple[str, float], ...] = ()
    """In matrices, by role within the layer. Of a unit it may be a mean, and so a fraction."""
    vector: int = 0
    """In norms and biases, which are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """What a whole part's weights consist of."""

    unit: Weights
    """Weights of each unit: a query head, a column."""
    group: Weights = Weights()
    """Weights that several units share: a KV head's."""
    fixed: Weights
    """Held by every shard that has a unit."""


class Part(Protocol):
    """One half of a layer as data."""

    kind: ClassVar[str]
    """In JSON."""

    @property
    def has_post_norm(self) -> bool: ...

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Its weights by role within the layer; matrices are [outputs, inputs]."""
        ...

    def weights(self, hidden_size: int) -> PartWeights: ...

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """Values that are alive at once for each row of a step, however kernels keep them."""
        ...

    def of_units(self, units: range) -> Self | None:
        """What a shard with these units computes; None for none."""
        ...

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        """What such a shard multiplies by; `layer` is the prefix of its roles."""
        ...

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        """Its norms and biases. The first shard with units adds what is to be added once.

        Every shard of the layer norms what all of them made, whether or not it has units.
        """
        ...


def whole_vector(role: str, length: int) -> VectorSlice:
    return VectorSlice(name=role, parts=((role, range(length)),))


def layer_number(layer: str) -> int:
    """Number of the layer whose roles begin like this; 0 where they are without one."""
    return int(layer.split(".")[1]) if layer else 0


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise ValueError(f"{name} must be an integer in 1..{MAX_SIZE}, not {shown(value)}")


def check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if type(value) is not bool:
            raise ValueError(f"{name} must be true or false, not {shown(value)}")


def finite(value: object) -> float:
    """A finite number from JSON, as it is. ValueError for anything else."""
    if type(value) not in (int, float) or not abs(value) < _LARGEST_NUMBER:  # type: ignore[arg-type]
        raise ValueError(f"{shown(value)} is not a finite number")
    return float(value)  # type: ignore[arg-type]


def made_of(cls: type[_Made], value: object) -> _Made | None:
    """As it is, or from JSON. Raises ValueError."""
    if value is None or isinstance(value, cls):
        return value
    return cls(**exact_fields(cls, value))


def exact_fields(cls: Any, value: object, *others: str) -> Mapping[str, Any]:
    """The fields of a dataclass from JSON, and `others`: all of them, and no more. ValueError."""
    names = {field.name for field in dataclasses.fields(cls)}.union(others)
    if not isinstance(value, Mapping) or set(value) != names:
        raise ValueError("a model description has other fields than this version knows")
    return value
