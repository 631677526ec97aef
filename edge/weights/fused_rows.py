"""Matrices that a checkpoint holds in one tensor with others, as if each were its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.experts import Experts, expert_name
from edge.models.spec import ModelSpec, tensor_shapes
from edge.offload import Closing, StoreError, WeightStore, checked_runs


class TensorPart(Protocol):
    """A matrix, or a bias, that is a part of a tensor that is called otherwise."""

    @property
    def tensor(self) -> str: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def extent(self) -> tuple[int, ...]:
        """The least that the leading axes of the tensor must measure."""
        ...

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's, of the tensor's."""
        ...

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        """Rows and columns of the part, which lie within it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeRows:
    """Rows that are next to each other."""

    tensor: str
    rows: range

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def extent(self) -> tuple[int, ...]:
        return (self.rows.stop,)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return self.num_rows, *whole[1:]

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        first = self.rows.start
        return store.read(
            self.tensor, rows=range(first + rows.start, first + rows.stop), columns=columns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfHeads:
    """The same rows of each head, where the tensor has all rows of one head, then of the next."""

    tensor: str
    heads: int
    rows: range
    """Rows of the first head."""
    height: int
    """Rows that a head has in all."""

    @property
    def num_rows(self) -> int:
        return self.heads * len(self.rows)

    @property
    def extent(self) -> tuple[int, ...]:
        return (self.heads * self.height,)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return self.num_rows, *whole[1:]

    def runs(self, rows: range) -> list[range]:
        """Where these rows are in the tensor, in their order."""
        own = len(self.rows)
        runs = []
        for head in range(rows.start // own, -(-rows.stop // own)):
            first, start = head * self.height + self.rows.start, head * own
            begin, end = max(rows.start - start, 0), min(rows.stop - start, own)
            runs.append(range(first + begin, first + end))
        return runs

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        runs = self.runs(rows) or [range(0)]
        return np.concatenate([store.read(self.tensor, rows=run, columns=columns) for run in runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfOne:
    """Rows of one of the matrices of a tensor [matrices, rows, columns]."""

    tensor: str
    number: int
    rows: range

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def extent(self) -> tuple[int, ...]:
        return self.number + 1, self.rows.stop

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return self.num_rows, *whole[2:]

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        run = range(self.rows.start + rows.start, self.rows.start + rows.stop)
        read: NDArray[Any]
        (read,) = store.read(self.tensor, rows=range(self.number, self.number + 1), columns=run)
        if columns is None:
            return read
        return np.ascontiguousarray(read[:, columns.start : columns.stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsOfOne:
    """Columns of one of the matrices of a tensor [matrices, rows, columns], as rows; or elements of
    one of the rows of a tensor [rows, elements]."""

    tensor: str
    number: int
    columns: range
    """Maybe every other one."""
    height: int | None
    """Rows of each matrix; None where each is a row."""

    @property
    def num_rows(self) -> int:
        return len(self.columns)

    @property
    def extent(self) -> tuple[int, ...]:
        rows = () if self.height is None else (self.height,)
        return (self.number + 1, *rows, self.columns.stop)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (self.num_rows,) if self.height is None else (self.num_rows, self.height)

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        kept = self.columns[rows.start : rows.stop]
        at = slice(kept.start, kept.stop, kept.step)
        found: NDArray[Any]
        run = None if self.height is None else columns
        (found,) = store.read(self.tensor, range(self.number, self.number + 1), run)
        return np.ascontiguousarray(found[..., at].T)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedRows:
    """Columns of a matrix that are next to each other, as rows."""

    tensor: str
    columns: range
    height: int
    """Rows of the tensor."""

    @property
    def num_rows(self) -> int:
        return len(self.columns)

    @property
    def extent(self) -> tuple[int, ...]:
        return self.height, self.columns.stop

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return self.num_rows, *whole[:1]

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        first = self.columns.start
        run = range(first + rows.start, first + rows.stop)
        return np.ascontiguousarray(store.read(self.tensor, rows=columns, columns=run).T)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRows:
    """Rows of heads in groups, where the tensor has the first head of each group, then the second
    of each, and so on. Rows before them are where they should be."""

    tensor: str
    first: int
    """Where this part begins in the tensor."""
    before: int
    """Rows of it that are no such heads."""
    tiles: Tiles

    @property
    def num_rows(self) -> int:
        return self.before + self.tiles.count

    @property
    def extent(self) -> tuple[int, ...]:
        return (self.first + self.num_rows,)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return self.num_rows, *whole[1:]

    def runs(self, rows: range) -> list[range]:
        """Where these rows are in the tensor, in their order."""
        plain = range(rows.start, min(rows.stop, self.before))
        tiled = range(max(rows.start - self.before, 0), max(rows.stop - self.before, 0))
        runs = [plain] if plain else []
        runs += [_shifted(run, self.before) for run in self.tiles.runs(tiled)]
        return [_shifted(run, self.first) for run in runs]

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        runs = self.runs(rows) or [range(0)]
        return np.concatenate([store.read(self.tensor, rows=run, columns=columns) for run in runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledColumns:
    """A whole matrix whose columns are heads in that order."""

    tensor: str
    num_rows: int
    tiles: Tiles

    @property
    def extent(self) -> tuple[int, ...]:
        return self.num_rows, self.tiles.count

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return whole

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        runs = self.tiles.runs(range(self.tiles.count) if columns is None else columns)
        read = [store.read(self.tensor, rows=rows, columns=run) for run in runs or [range(0)]]
        return np.concatenate(read, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Heads in groups: of `size` elements, `each` of them to a group."""

    groups: int
    each: int
    size: int

    @property
    def count(self) -> int:
        """Elements of all."""
        return self.groups * self.each * self.size

    def runs(self, elements: range) -> list[range]:
        """Where these are, which are counted group by group, where heads are not."""
        found = []
        for head in range(elements.start // self.size, -(-elements.stop // self.size)):
            group, number = divmod(head, self.each)
            start = (number * self.groups + group - head) * self.size
            run = range(max(elements.start, head * self.size), (head + 1) * self.size)
            found.append(range(start + run.start, start + min(run.stop, elements.stop)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A part with an axis of 1 more: a vector as a row, say."""

    part: TensorPart
    axis: int

    @property
    def tensor(self) -> str:
        return self.part.tensor

    @property
    def num_rows(self) -> int:
        return self.part.num_rows if self.axis else 1

    @property
    def extent(self) -> tuple[int, ...]:
        return self.part.extent

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        found = self.part.shape(whole)
        return (*found[: self.axis], 1, *found[self.axis :])

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        if self.axis == 0:
            columns = range(self.part.num_rows) if columns is None else columns
            return self.part.read(store, columns, None)[None][: len(rows)]
        found = np.expand_dims(self.part.read(store, rows, None), self.axis)
        if columns is None:
            return found
        return np.ascontiguousarray(found[:, columns.start : columns.stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOfNegative:
    """What a part's numbers are minus the exponentials of."""

    part: TensorPart

    @property
    def tensor(self) -> str:
        return self.part.tensor

    @property
    def num_rows(self) -> int:
        return self.part.num_rows

    @property
    def extent(self) -> tuple[int, ...]:
        return self.part.extent

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return self.part.shape(whole)

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        with np.errstate(divide="ignore", invalid="ignore"):  # no number: the caller looks
            found: NDArray[Any] = np.log(-self.part.read(store, rows, columns))
        return found


def _shifted(rows: range, first: int) -> range:
    return range(first + rows.start, first + rows.stop)


def fused_rows(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> dict[str, SomeRows]:
    """By the names of the roles' tensors; whether or not a checkpoint has the fused ones.

    `fused`: as of a Family.
    """
    return {
        tensor_name(role): SomeRows(tensor=tensor, rows=rows)
        for role, tensor, rows in _fused(fused, spec, tensor_name)
    }


def turned_rows(
    turned: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> dict[str, TensorPart]:
    """The same for matrices that are [columns, rows]; their biases are as of others."""
    shapes = tensor_shapes(spec)
    found: dict[str, TensorPart] = {}
    for role, tensor, rows in _fused(turned, spec, tensor_name):
        part: TensorPart = SomeRows(tensor=tensor, rows=rows)
        if len(shapes[role]) == 2:
            part = TurnedRows(tensor=tensor, columns=rows, height=shapes[role][1])
        found[tensor_name(role)] = part
    return found


def _fused(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> Iterator[tuple[str, str, range]]:
    """(role, the tensor that it is in, its rows there)."""
    shapes = tensor_shapes(spec)
    for layer in range(spec.num_layers):
        for whole, parts in fused.items():
            for suffix in ("weight", "bias"):
                roles = [f"layers.{layer}.{part}.{suffix}" for part in parts]
                if any(role not in shapes for role in roles):
                    continue
                first, tensor = 0, _beside(tensor_name(roles[0]), layer, f"{whole}.{suffix}")
                for role in roles:
                    rows = range(first, first + shapes[role][0])
                    yield role, tensor, rows
                    first = rows.stop


def rows_of_heads(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> dict[str, TensorPart]:
    """The same for matrices of linear attention that have one key head after the other."""
    shapes = tensor_shapes(spec)
    found: dict[str, TensorPart] = {}
    for layer in range(spec.num_layers):
        heads = spec.layer(layer).mixer.num_units
        for whole, parts in fused.items():
            roles = [f"layers.{layer}.{part}.weight" for part in parts]
            if any(role not in shapes for role in roles):
                continue
            sizes = [shapes[role][0] // heads for role in roles]
            tensor = _beside(tensor_name(roles[0]), layer, f"{whole}.weight")
            for role, stop, size in zip(roles, accumulate(sizes), sizes, strict=True):
                found[tensor_name(role)] = RowsOfHeads(
                    tensor=tensor, heads=heads, rows=range(stop - size, stop), height=sum(sizes)
                )
    return found


def rows_of_experts(
    stacked: Mapping[str, tuple[str, ...]],
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    *,
    there: Container[str] | None = None,
) -> dict[str, TensorPart]:
    """The same for matrices of experts, those of a layer in one tensor.

    there: tensors of a checkpoint, where there is a choice; parts of others are not told.
    """
    found: dict[str, TensorPart] = {}
    for layer in range(spec.num_layers):
        part = spec.layer(layer).feed_forward
        if not isinstance(part, Experts):
            continue
        heights = {"gate": part.columns, "up": part.columns, "down": spec.hidden_size}
        for whole, matrices in stacked.items():
            sizes = [heights[matrix] for matrix in matrices]
            one = tensor_name(f"{expert_name(f'layers.{layer}.', 0)}{matrices[0]}.weight")
            if there is not None and _beside(one, layer, whole) not in there:
                continue
            for number in range(part.num_experts):
                own = expert_name(f"layers.{layer}.", number)
                for matrix, stop, size in zip(matrices, accumulate(sizes), sizes, strict=True):
                    name = tensor_name(f"{own}{matrix}.weight")
                    found[name] = RowsOfOne(
                        tensor=_beside(name, layer, whole),
                        number=number,
                        rows=range(stop - size, stop),
                    )
    return found


def columns_of_experts(
    turned: Mapping[str, tuple[str, ...]],
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    *,
    there: Container[str] | None = None,
) -> dict[str, TensorPart]:
    """The same where rows are columns, and those of several matrices lie in turn."""
    found: dict[str, TensorPart] = {}
    for layer in range(spec.num_layers):
        part = spec.layer(layer).feed_forward
        if not isinstance(part, Experts):
            continue
        shapes = part.shapes(spec.hidden_size)
        for whole, matrices in turned.items():
            one = tensor_name(f"{expert_name(f'layers.{layer}.', 0)}{matrices[0]}")
            if there is not None and _beside(one, layer, whole) not in there:
                continue
            for number, (place, matrix) in product(range(part.num_experts), enumerate(matrices)):
                role = expert_name("", number) + matrix
                rows, *columns = shapes[role]
                name = tensor_name(f"layers.{layer}.{role}")
                found[name] = ColumnsOfOne(
                    tensor=_beside(name, layer, whole),
                    number=number,
                    columns=range(place, rows * len(matrices), len(matrices)),
                    height=columns[0] if columns else None,
                )
    return found


def _beside(name: str, layer: int, other: str) -> str:
    """The name of another tensor of the same layer."""
    return f"{name.split(f'.{layer}.', 1)[0]}.{layer}.{other}"


class FusedStore(Closing):
    """A WeightStore in which parts of some tensors of another are tensors. It closes that one."""

    def __init__(self, store: WeightStore, parts: Mapping[str, TensorPart]) -> None:
        """Raises CheckpointError for a tensor with more or fewer rows than its parts have."""
        self.stored = store
        """The tensors as the file has them."""
        self._parts = dict(parts)
        whole: dict[str, tuple[int, ...]] = {}
        for part in parts.values():
            extent = whole.get(part.tensor, part.extent)
            whole[part.tensor] = tuple(map(max, extent, part.extent))
        for tensor, extent in whole.items():
            if store.shape(tensor)[: len(extent)] != extent:
                raise CheckpointError(
                    f"{store.where(tensor)}: tensor {tensor} has shape "
                    f"{list(store.shape(tensor))}, and the configuration makes it "
                    f"{' x '.join(map(str, extent))} rows: they belong to different checkpoints, "
                    "download all of one again"
                )
        self._names = tuple(sorted((set(store.names()) - set(whole)) | set(parts)))
        told = json.dumps([[name, repr(part)] for name, part in parts.items()])
        digest = hashlib.sha256(f"{store.fingerprint}\0{told}".encode())
        self.fingerprint = digest.hexdigest()[:32]
        """From the store's, and from what is taken from where."""

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        if part is None:
            return self.stored.shape(name)
        return part.shape(self.stored.shape(part.tensor))

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.stored.dtype(self._tensor(name))

    def where(self, name: str) -> str:
        return self.stored.where(self._tensor(name))

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        part = self._parts.get(name)
        if part is None:
            return self.stored.read(name, rows=rows, columns=columns)
        given = range(part.num_rows) if rows is None else rows
        (rows, *_) = checked_runs(self.shape(name), given, columns)
        return part.read(self.stored, rows, columns)

    def close(self) -> None:
        self.stored.close()

    def _tensor(self, name: str) -> str:
        part = self._parts.get(name)
        return name if part is None else part.tensor


def with_fused_rows(store: WeightStore, parts: Mapping[str, TensorPart]) -> WeightStore:
    """The parts whose tensors the store has as floats are tensors of the result."""
    present = set(store.names())
    found = {
        name: part
        for name, part in parts.items()
        if part.tensor in present and _is_float(store, part.tensor)
    }
    return FusedStore(store, found) if found else store


def _is_float(store: WeightStore, name: str) -> bool:
    """Else it is codes, or floats of 8 bits, with scales in another tensor."""
    with suppress(StoreError):
        return store.dtype(name).name in ("float32", "float16", "bfloat16")
    return False
