"""Weights of a layer's experts in one piece, for the node that computes all of them.

A shard's file has them matrix by matrix, as they are streamed and as GPUs want them. So they are
written once more, to files that are gone when the node's kernels have packed them.
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

from edge.backends.ort.runtime import ort
from edge.backends.shard_arrays import ShardArrays
from edge.kernels.experts.onnx import in_turn
from edge.kernels.onnx_graph import ExternalTensor
from edge.memory.step_memory import stacked_experts_fit
from edge.models.experts import Experts, expert_name
from edge.offload import DerivedCache, StoreFullError, disk_errors_as_store_errors
from edge.weights.block_matrices import Blocks
from edge.weights.recipe import StoredMatrix

_LEAST_VERSION = (1, 31)
"""Version of ONNX Runtime. Earlier ones multiply with such weights as floats, or have no such
node."""

_BITS = (4, 8)
_PAGE_BYTES = 4096
_MOST_UNEVEN = 4 / 3
"""What is gained with experts of 1536 x 768 is 1.6, and with large ones hardly anything."""

_SUFFIXES = ("codes", "scales")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStack:
    """A layer's, where they lie."""

    kind: Blocks
    tensors: Mapping[str, ExternalTensor]
    """By the names in `StackedWeights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Those of a shard."""

    folder: Path
    """Below which graphs find their files, and the shard's."""
    by_layer: Mapping[int, StoredStack]
    paths: tuple[Path, ...] = ()
    """Their files. What is packed is let go of; what is not stays mapped, and on the disk."""


def stacked_kinds(arrays: ShardArrays, *, hidden_size: int, threads: int) -> dict[int, Blocks]:
    """The kind of the experts' matrices, by layer where one node can compute them."""
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
    """Whether threads that compute a token's experts alone end at about the same time. With more
    threads than experts all of them are at each product, as they are in branches."""
    rounds = -(-top_k // threads)
    return top_k < threads or rounds * threads <= _MOST_UNEVEN * top_k


@contextlib.contextmanager
def written_stacks(
    arrays: ShardArrays, kinds: Mapping[int, Blocks], cache: DerivedCache | None
) -> Iterator[Stacks]:
    """No layer's where there is no such cache, or no room on its disk. Their files are gone at the
    end."""
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
    """Write one of the arrays of all matrices, and tell where each is."""
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
    """By layer, a list for each that the shard has."""
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
    """Whether the node has such a block."""
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
