"""Stacked weights of a layer's experts, for the node that computes all of them.

A shard's file has one matrix after the other, as streaming and GPUs need them. So the stacks are
written to temporary files, which are deleted once the node's kernels have packed them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.backends.onnx.segments import StoredStack
from edge.backends.shard_arrays import ShardArrays
from edge.kernels.experts.onnx import in_turn
from edge.kernels.onnx_graph import ExternalTensor
from edge.memory.step_memory import stacked_experts_fit
from edge.models.experts import Experts, expert_name
from edge.offload import DerivedCache, StoreFullError, disk_errors_as_store_errors
from edge.weights.block_matrices import Blocks
from edge.weights.recipe import StoredMatrix

_LEAST_VERSION = (1, 31)
"""Least version of ONNX Runtime. Earlier ones multiply as floats, or lack the node."""

_BITS = (4, 8)
_PAGE_BYTES = 4096
_MOST_UNEVEN = 4 / 3
"""Most unevenness between threads. The node is 1.6 times as fast with experts of 1536 x 768, and
hardly faster with large ones."""

_SUFFIXES = ("codes", "scales")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of a shard."""

    folder: Path
    """The folder in which graphs find these files and the shard's."""
    by_layer: Mapping[int, StoredStack]
    paths: tuple[Path, ...] = ()
    """The files of the stacks. Tensors that are not packed stay mapped and keep disk space."""


def stacked_kinds(arrays: ShardArrays, *, hidden_size: int, threads: int) -> dict[int, Blocks]:
    """Layers whose experts one node can compute, with the kind of their matrices."""
    version = tuple(int(each) for each in ort.__version__.split(".")[:2])
    if version < _LEAST_VERSION or arrays.format.accuracy != "fast":
        return {}
    stored = _of_experts(arrays)
    kinds: dict[int, Blocks] = {}
    for number in arrays.layout.layers:
        part = arrays.layout.layer(number).feed_forward
        if not isinstance(part, Experts) or not is_shared_out(part.top_k, threads=threads):
            continue
        kind = _one_kind(stored[number])
        if kind is None or not _is_computed(part, kind, hidden_size):
            continue
        if stacked_experts_fit(part, hidden_size, threads):
            kinds[number] = kind
    return kinds


def is_shared_out(top_k: int, *, threads: int) -> bool:
    """Whether threads with whole experts of a token end at about the same time. With more threads
    than experts, all threads share each product."""
    rounds = -(-top_k // threads)
    return top_k < threads or rounds * threads <= _MOST_UNEVEN * top_k


@contextlib.contextmanager
def written_stacks(
    arrays: ShardArrays, kinds: Mapping[int, Blocks], cache: DerivedCache | None
) -> Iterator[Stacks]:
    """Write the stacks; none without a cache or room on its disk. The files are deleted when the
    context ends."""
    nothing = Stacks(folder=arrays.path.parent, by_layer={})
    if cache is None or not kinds:
        yield nothing
        return
    with cache.scratch() as scratch:
        paths = {suffix: scratch.resolve() / f"experts.{suffix}" for suffix in _SUFFIXES}
        folder = Path(os.path.commonpath((scratch.resolve(), arrays.path.resolve())))
        places: dict[int, dict[str, ExternalTensor]] = {number: {} for number in kinds}
        try:
            with disk_errors_as_store_errors(scratch):
                for suffix, path in paths.items():
                    _write_all(arrays, places, path, suffix, folder)
        except StoreFullError:
            yield nothing
            return
        yield Stacks(
            folder=folder,
            by_layer={
                number: StoredStack(kind=kind, tensors=places[number])
                for number, kind in kinds.items()
            },
            paths=tuple(paths.values()),
        )


def _write_all(
    arrays: ShardArrays,
    places: Mapping[int, dict[str, ExternalTensor]],
    path: Path,
    suffix: str,
    folder: Path,
) -> None:
    """Write one array (`suffix`) of all matrices, and enter each place in `places`."""
    with path.open("xb") as file:
        for number, tensors in places.items():
            part = arrays.layout.layer(number).feed_forward
            assert isinstance(part, Experts)
            names = [expert_name(f"layers.{number}.", each) for each in part.held]
            for matrix in ("gate_up", "down"):
                found = _read(arrays, names, matrix, suffix)
                location = str(path.relative_to(folder))
                tensors[f"{matrix}_{suffix}"] = _write(file, found, location)


def _read(
    arrays: ShardArrays, names: list[str], matrix: str, suffix: str
) -> Iterator[NDArray[Any]]:
    for name in names:
        array = arrays.read(f"{name}{matrix}.{suffix}")
        yield in_turn(array) if matrix == "gate_up" else array.reshape(len(array), -1)


def _write(file: BinaryIO, parts: Iterator[NDArray[Any]], location: str) -> ExternalTensor:
    start = -(-file.tell() // _PAGE_BYTES) * _PAGE_BYTES
    file.seek(start)
    count = 0
    for part in parts:
        file.write(np.ascontiguousarray(part).data)
        count += 1
        dtype, shape = part.dtype, part.shape
    return ExternalTensor(
        location=location,
        offset=start,
        nbytes=file.tell() - start,
        dtype=dtype,
        shape=(count, *shape),
    )


def _of_experts(arrays: ShardArrays) -> dict[int, list[StoredMatrix]]:
    """The matrices of the shard's experts, by layer."""
    found: dict[int, list[StoredMatrix]] = {number: [] for number in arrays.layout.layers}
    for matrix in arrays.layout.matrices:
        if ".experts." in matrix.name:
            found[int(matrix.name.split(".", 2)[1])] += arrays.format.recipe.stored(matrix)
    return found


def _one_kind(matrices: list[StoredMatrix]) -> Blocks | None:
    kinds = {each.kind for each in matrices}
    if len(kinds) != 1 or any(each.padding for each in matrices):
        return None
    (kind,) = kinds
    if isinstance(kind, Blocks) and kind == Blocks(kind.bits, kind.block_size):
        return kind
    return None


def _is_computed(part: Experts, kind: Blocks, hidden_size: int) -> bool:
    """Whether the node supports this block of experts."""
    return (
        kind.bits in _BITS
        and part.activation == "silu"
        and part.clamp is None
        and not part.bias
        and all(
            each % kind.block_size == 0 and each >= 2 * kind.block_size
            for each in (hidden_size, part.columns)
        )
    )
