"""Recipes: the kinds of a model's matrices. Pure.

Most matrices are of one kind. Rules name the exceptions: sensitive matrices in a finer kind, or
matrices that a file has in another kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from numpy.typing import NDArray

from edge.models.parts import MatrixSlice, Rows
from edge.weights.matrix_kind import MatrixKind, StoredArray, WeightSource

Kind = MatrixKind[Any]

MAX_MATRIX_KINDS = 16
"""Most different kinds in a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """Rows of a shard's matrix that are of one kind, and are stored and multiplied together."""

    part: MatrixSlice
    """The slice, with the name of the whole matrix if all of it is of this kind."""
    kind: Kind
    rows: range
    """Rows of the shard's matrix."""

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def padding(self) -> int:
        """Zeros before a product's inputs, if the slice begins inside a block."""
        if self.part.is_transposed:
            return 0  # its blocks begin with it
        return self.kind.padding(self.part.columns.start)

    @property
    def columns(self) -> int:
        """Stored columns, with padding."""
        return self.padding + len(self.part.columns)

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        return self.kind.arrays(self.part.num_rows, self.columns)

    @property
    def packed_bytes(self) -> float:
        """Bytes in the memory of a CPU, with what kinds store beside the slice."""
        return self.kind.packed_bytes(len(self.rows), len(self.part.columns), self.padding)


@dataclass(frozen=True, slots=True)
class Rule:
    """The kind of one matrix: of every layer, or of those of a grade (see LayerSpec)."""

    role: str
    """"head", or the role within its layer, such as "down.weight". This also applies to experts,
    and to shared ones without a rule for "shared.down.weight"."""
    kind: Kind
    grade: int | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The kind of most matrices, and those of others; the first rule for a matrix counts."""

    usual: Kind
    rules: tuple[Rule, ...] = ()

    def kind(self, role: str, grade: int) -> Kind:
        """The kind of a matrix. role: in the model, or within its layer."""
        for name in _rule_names(role):
            for rule in self.rules:
                if rule.role == name and rule.grade in (None, grade):
                    return rule.kind
        return self.usual

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The different kinds, the usual one first."""
        return tuple(dict.fromkeys((self.usual, *(rule.kind for rule in self.rules))))

    def column_multiple(self, roles: Iterable[str]) -> int:
        """Columns of these matrices can be divided in multiples of this; 1 without matrices.

        Block sizes are powers of 2, so the largest is a multiple of all.
        """
        names = [frozenset(_rule_names(role)) for role in roles]
        ruled = {rule.role for rule in self.rules if rule.grade is None}
        kinds = {rule.kind for rule in self.rules if any(rule.role in each for each in names)}
        if any(each.isdisjoint(ruled) for each in names):
            kinds.add(self.usual)
        return max((kind.column_multiple for kind in kinds), default=1)

    def stored(self, matrix: MatrixSlice) -> tuple[StoredMatrix, ...]:
        """A shard's matrix, as runs of rows of one kind."""
        if matrix.is_transposed:
            kind = self.kind(matrix.parts[0][0], matrix.grade).transposed
            return (StoredMatrix(part=matrix, kind=kind, rows=range(matrix.num_rows)),)
        runs = groupby(matrix.parts, key=lambda part: self.kind(part[0], matrix.grade))
        return tuple(_stored(matrix, [(kind, tuple(rows)) for kind, rows in runs]))

    def read(self, matrix: StoredMatrix, source: WeightSource) -> dict[str, NDArray[Any]]:
        """The stored arrays of a matrix, by suffix."""
        if not matrix.part.is_transposed:
            return source.matrix(matrix.part)
        ((role, rows),) = matrix.part.parts
        parts = ((role, matrix.part.columns),)
        whole = dataclasses.replace(matrix.part, parts=parts, columns=rows, is_transposed=False)
        values = source.unrounded(whole)
        if values is None:
            kind = self.kind(role, whole.grade)
            values = kind.floats(source.matrix(whole).__getitem__, len(rows))[: whole.num_rows]
        return matrix.kind.rounded(values.T)

    def all_stored(self, matrices: Iterable[MatrixSlice]) -> tuple[StoredMatrix, ...]:
        return tuple(each for matrix in matrices for each in self.stored(matrix))


def rule_role(role: str) -> str:
    """The name in rules of a role in the model, or within its layer."""
    for of_many in ("layers.", "experts."):
        if role.startswith(of_many):
            role = role.split(".", 2)[2]
    return role


def _rule_names(role: str) -> tuple[str, ...]:
    """Roles whose rules apply to a role, by precedence."""
    local = rule_role(role)
    return tuple(dict.fromkeys((local, local.removeprefix("shared."))))


def _stored(matrix: MatrixSlice, runs: list[tuple[Kind, Rows]]) -> Iterator[StoredMatrix]:
    start = 0
    for number, (kind, parts) in enumerate(runs):
        name = matrix.name if len(runs) == 1 else f"{matrix.name}.{number}"
        part = dataclasses.replace(matrix, name=name, parts=parts)
        yield StoredMatrix(part=part, kind=kind, rows=range(start, start + part.num_rows))
        start += part.num_rows
