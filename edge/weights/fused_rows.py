"""Splits tensors in which a checkpoint has several fused matrices."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.experts import Experts, expert_name
from edge.models.spec import ModelSpec, tensor_shapes
from edge.offload import Closing, StoreError, WeightStore, checked_runs


@dataclass(frozen=True, slots=True)
class Steps:
    """Positions along an axis, in order: for each index of an array of shape `counts`, `first` plus
    the sum of indices times `strides`."""

    first: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, run: range) -> Steps:
        return cls(run.start, (len(run),), (run.step,))

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    @property
    def stop(self) -> int:
        """The last position plus 1."""
        last = (
            (count - 1) * stride for count, stride in zip(self.counts, self.strides, strict=True)
        )
        return self.first + sum(last) + 1

    def runs(self, some: range) -> list[range]:
        """Some of the positions, as ranges."""
        size, stride, found = self.counts[-1], self.strides[-1], []
        for line in range(some.start // size, -(-some.stop // size)):
            first, rest = self.first - line * size * stride, line
            for count, step in list(zip(self.counts, self.strides, strict=True))[-2::-1]:
                rest, index = divmod(rest, count)
                first += index * step
            begin, end = max(some.start, line * size), min(some.stop, (line + 1) * size)
            found.append(range(first + begin * stride, first + end * stride, stride))
        return found


def tiled(groups: int, each: int, size: int, *, first: int = 0) -> Steps:
    """Heads of `size` elements in groups of `each`, of a tensor with the first head of each group
    first, then the second of each, and so on."""
    return Steps(first, (groups, each, size), (size, groups * size, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A matrix, or a bias, that is a part of a tensor with another name."""

    tensor: str
    rows: tuple[Steps, ...]
    """Positions of its rows."""
    columns: Steps | None = None
    """Positions of its columns; None: all in order."""
    number: int | None = None
    """Its index along a first axis of the tensor, if there is one."""
    height: int | None = None
    """Rows of a transposed tensor, whose columns are the part's rows; None: not transposed."""
    new_axis: int | None = None
    """An axis of size 1 to add, for example to make a vector a row."""
    is_logarithm: bool = False
    """Whether the tensor has minus the exponentials of the values."""

    @property
    def num_rows(self) -> int:
        return 1 if self.new_axis == 0 else self._count

    @property
    def _count(self) -> int:
        return sum(each.count for each in self.rows)

    @property
    def extent(self) -> tuple[int, ...]:
        """The least sizes of the tensor's leading axes."""
        stop = max(each.stop for each in self.rows)
        last = None if self.columns is None else self.columns.stop
        number = None if self.number is None else self.number + 1
        return tuple(size for size in (number, self.height, stop, last) if size is not None)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape, from the tensor's."""
        axes = whole if self.number is None else whole[1:]
        shape = self._count, *(axes[1:] if self.height is None else axes[:1])
        at = self.new_axis
        return shape if at is None else (*shape[:at], 1, *shape[at:])

    def runs(self, rows: range) -> list[range]:
        """The positions of these rows in the tensor, as ranges in order."""
        found, start = [], 0
        for each in self.rows:
            some = range(max(rows.start - start, 0), min(rows.stop - start, each.count))
            found += each.runs(some) if some else []
            start += each.count
        return found or [range(0)]

    def read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        """Read rows and columns of the part."""
        if self.new_axis is None:
            return self._read(store, rows, columns)
        if self.new_axis == 0:
            elements = range(self._count) if columns is None else columns
            return self._read(store, elements, None)[None][: len(rows)]
        found = np.expand_dims(self._read(store, rows, None), self.new_axis)
        return (
            found
            if columns is None
            else np.ascontiguousarray(found[:, columns.start : columns.stop])
        )

    def _read(self, store: WeightStore, rows: range, columns: range | None) -> NDArray[Any]:
        across: Sequence[range | None] = [columns]
        if self.columns is not None:
            whole = range(self.columns.count) if columns is None else columns
            across = self.columns.runs(whole) or [range(0)]
        axes = [self.runs(rows), across]
        if self.height is not None:
            axes.reverse()
        if self.number is None:
            found = _read(store, self.tensor, axes)
        else:
            one = range(self.number, self.number + 1)
            found = _read(store, self.tensor, [[one], *axes])[0]
        found = np.ascontiguousarray(found if self.height is None else found.T)
        if self.is_logarithm:
            with np.errstate(divide="ignore", invalid="ignore"):  # the caller checks for NaN
                found = np.log(-found)
        return found


def rows_of(tensor: str, rows: range, *, number: int | None = None) -> TensorPart:
    """Consecutive rows of a matrix, or of matrix `number` of a stack."""
    return TensorPart(tensor=tensor, rows=(Steps.of(rows),), number=number)


def turned(tensor: str, columns: range, height: int) -> TensorPart:
    """Columns of a matrix with `height` rows, as rows."""
    return TensorPart(tensor=tensor, rows=(Steps.of(columns),), height=height)


def rows_of_each(tensor: str, heads: int, rows: range, height: int) -> TensorPart:
    """The same rows of each head, of a tensor with `height` rows for each head."""
    steps = Steps(rows.start, (heads, len(rows)), (height, 1))
    return TensorPart(tensor=tensor, rows=(steps,))


def _read(store: WeightStore, tensor: str, axes: Sequence[Sequence[range | None]]) -> NDArray[Any]:
    """Read these ranges along each axis; None: all. Stores read runs along the first two axes."""
    first, second, *others = axes

    def piece(one: range | None, other: range | None) -> NDArray[Any]:
        found = store.read(tensor, rows=_span(one), columns=_span(other))
        steps = [slice(None, None, 1 if run is None else run.step) for run in (one, other)]
        return found[tuple(steps[: found.ndim])]

    found = _joined([_joined([piece(one, other) for other in second], -1) for one in first], 0)
    for runs in others:  # at most one axis: columns
        found = _joined(
            [found if r is None else found[..., r.start : r.stop : r.step] for r in runs], -1
        )
    return found


def _joined(parts: list[NDArray[Any]], axis: int) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def _span(run: range | None) -> range | None:
    """The run without steps that covers a run."""
    return run if run is None or run.step == 1 else range(run.start, run[-1] + 1)


def fused_rows(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> dict[str, TensorPart]:
    """Parts by the names of roles' tensors, whether or not the checkpoint has fused ones.

    fused: see Family.
    """
    return {
        tensor_name(role): rows_of(tensor, rows)
        for role, tensor, rows in _fused(fused, spec, tensor_name)
    }


def turned_rows(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> dict[str, TensorPart]:
    """As `fused_rows`, for matrices that are stored as [columns, rows], with usual biases."""
    shapes = tensor_shapes(spec)
    found: dict[str, TensorPart] = {}
    for role, tensor, rows in _fused(fused, spec, tensor_name):
        is_matrix = len(shapes[role]) == 2
        part = turned(tensor, rows, shapes[role][1]) if is_matrix else rows_of(tensor, rows)
        found[tensor_name(role)] = part
    return found


def _fused(
    fused: Mapping[str, tuple[str, ...]], spec: ModelSpec, tensor_name: Callable[[str], str]
) -> Iterator[tuple[str, str, range]]:
    """(role, fused tensor, rows in it) of each fused matrix and bias."""
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
    """As `fused_rows`, for linear attention with one key head after the other."""
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
                rows = range(stop - size, stop)
                found[tensor_name(role)] = rows_of_each(tensor, heads, rows, sum(sizes))
    return found


def rows_of_experts(
    stacked: Mapping[str, tuple[str, ...]],
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    *,
    there: Container[str] | None = None,
) -> dict[str, TensorPart]:
    """As `fused_rows`, for experts of a layer in one tensor.

    there: the checkpoint's tensors, if there are alternatives; parts of others are left out.
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
                    tensor = _beside(name, layer, whole)
                    found[name] = rows_of(tensor, range(stop - size, stop), number=number)
    return found


def columns_of_experts(
    turned: Mapping[str, tuple[str, ...]],
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    *,
    there: Container[str] | None = None,
) -> dict[str, TensorPart]:
    """As `rows_of_experts`, for transposed tensors in which several matrices alternate."""
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
                in_turn = range(place, rows * len(matrices), len(matrices))
                found[name] = TensorPart(
                    tensor=_beside(name, layer, whole),
                    rows=(Steps.of(in_turn),),
                    number=number,
                    height=columns[0] if columns else None,
                )
    return found


def _beside(name: str, layer: int, other: str) -> str:
    """The name of another tensor of the same layer."""
    return f"{name.split(f'.{layer}.', 1)[0]}.{layer}.{other}"


class FusedStore(Closing):
    """A WeightStore over another one, with parts of its tensors as tensors. Closes the other."""

    def __init__(self, store: WeightStore, parts: Mapping[str, TensorPart]) -> None:
        """Raises CheckpointError for a tensor with more or fewer rows than its parts have."""
        self.stored = store
        """The store of the file's tensors."""
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
        """Hash of the store's fingerprint, and of the parts."""

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
    """A store in which the parts of float tensors are tensors."""
    present = set(store.names())
    found = {
        name: part
        for name, part in parts.items()
        if part.tensor in present and _is_float(store, part.tensor)
    }
    return FusedStore(store, found) if found else store


def _is_float(store: WeightStore, name: str) -> bool:
    """Whether a tensor is floats, and not codes or 8-bit floats with scales in another tensor."""
    with suppress(StoreError):
        return store.dtype(name).name in ("float32", "float16", "bfloat16")
    return False
