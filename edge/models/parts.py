"""The interface of a layer's two parts as data, and slices of weights for tensor parallelism.

A layer is a mixer, which reads other tokens, and a feed-forward block, which does not. Both read
the hidden state, and add their output to it; input or output may be normed. Both are divided into
units (heads, columns), and a range of units is a smaller part of the same kind. Matrices that
produce units are split by rows and those that consume them by columns, so that a layer needs one
sum after each part (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

from edge.errors import shown

MAX_SIZE = 1 << 24
"""The largest dimension of a model; a larger one is a damaged file or a hostile peer."""

_LARGEST_NUMBER = 1e38
"""The largest float32."""

_Made = TypeVar("_Made")

Rows = tuple[tuple[str, range], ...]
"""(role, rows) of the sources of a slice, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSlice:
    """Rows of one or more weight matrices on top of each other, or columns of one matrix."""

    name: str
    parts: Rows
    """The rows of the whole matrices."""
    columns: range
    """The columns of the whole matrix; all of them for a slice by rows."""
    is_transposed: bool = False
    """Whether rows and columns are those of one matrix's transpose."""
    is_observed: bool = True
    """Whether its inputs are observed, rather than those of another slice of the same matrix."""
    grade: int = 0
    """The grade of its layer; see LayerSpec."""

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _role, rows in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSlice:
    """Pieces of weights, each flat, one after the other."""

    name: str
    parts: Rows
    row_size: int = 1
    """Elements per row; more than 1 for weights that are matrices in the checkpoint."""

    @property
    def num_elements(self) -> int:
        return self.row_size * sum(len(rows) for _role, rows in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A number of weights."""

    matrices: tuple[tuple[str, float], ...] = ()
    """Weights in matrices, by role within the layer; for a unit a mean, which may be a fraction."""
    transposed: tuple[tuple[str, float], ...] = ()
    """The same of matrices that are kept transposed."""
    vector: int = 0
    """Weights in norms and biases, which are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """The division of a part's weights: by unit, shared by units, by shard."""

    unit: Weights
    """Weights of each unit: a query head, a column."""
    group: Weights = Weights()
    """Weights that several units share, such as a KV head's."""
    fixed: Weights
    """Weights of every shard with a unit."""


class Part(Protocol):
    """One half of a layer as data."""

    kind: ClassVar[str]
    """The name of the kind in JSON."""

    @property
    def has_post_norm(self) -> bool: ...

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its weights by role within the layer; matrices are [outputs, inputs]."""
        ...

    def weights(self, hidden_size: int) -> PartWeights: ...

    def row_values(self, context_tokens: int, hidden_size: int) -> int:
        """The number of live values per row of a step, for any kernels."""
        ...

    def of_units(self, units: range) -> Self | None:
        """The part of a shard with these units; None: it has none."""
        ...

    def matrices(self, layer: str, hidden_size: int, units: range) -> Iterator[MatrixSlice]:
        """The matrices of such a shard. layer: the prefix of the roles."""
        ...

    def vectors(
        self, layer: str, hidden_size: int, units: range, *, is_first: bool
    ) -> Iterator[VectorSlice]:
        """The norms and biases of such a shard. The first one with units adds output biases, which
        are added once.

        Every shard of the layer norms the sum, with or without units.
        """
        ...


def whole_vector(role: str, length: int) -> VectorSlice:
    return VectorSlice(name=role, parts=((role, range(length)),))


def layer_number(layer: str) -> int:
    """The number of the layer with this prefix; 0: it has none."""
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
    """A finite number from JSON. Raises ValueError for other values."""
    if type(value) not in (int, float) or not abs(value) < _LARGEST_NUMBER:  # type: ignore[arg-type]
        raise ValueError(f"{shown(value)} is not a finite number")
    return float(value)  # type: ignore[arg-type]


def made_of(cls: type[_Made], value: object) -> _Made | None:
    """An instance, or one from JSON. Raises ValueError."""
    if value is None or isinstance(value, cls):
        return value
    return cls(**exact_fields(cls, value))


def exact_fields(cls: Any, value: object, *others: str) -> Mapping[str, Any]:
    """Exactly the fields of a dataclass, and `others`, from JSON. Raises ValueError."""
    names = {field.name for field in dataclasses.fields(cls)}.union(others)
    if not isinstance(value, Mapping) or set(value) != names:
        raise ValueError("a model description has other fields than this version knows")
    return value
