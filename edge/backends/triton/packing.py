"""A layer's matrices packed for GPU kernels, as tensors within one run of bytes.

Runs are stored in a file, made once from the shard, so that one read and one copy load a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from edge.backends.interface import ShardWeights
from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.device import Device
from edge.backends.triton.weights import from_device, gpu_arrays, placed
from edge.errors import RequestError
from edge.kernels.matmul_nbits.triton import Weight
from edge.models.experts import expert_number
from edge.offload import PIECE_BYTES, CachedShard, ExtentSpan, TensorEntry, padded
from edge.weights.recipe import StoredMatrix

_VERSION = 2
"""Raised when the file's contents change."""

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _Field:
    """An array of a matrix, and its place in its layer's run of bytes."""

    entry: TensorEntry
    start: int

    def spans(self) -> Iterator[ExtentSpan]:
        for number, piece in enumerate(self.entry.pieces):
            yield ExtentSpan(
                offset=self.entry.offset + number * PIECE_BYTES,
                nbytes=piece.nbytes,
                part=0,
                part_offset=self.start + number * PIECE_BYTES,
                digest=piece.digest,
            )

    def within(self, run: Tensor) -> Tensor:
        flat = run[self.start : self.start + self.entry.nbytes]
        return flat.view(_TORCH_DTYPES[self.entry.dtype]).view(self.entry.shape)


class LayerRun:
    """The contents of one layer's run of bytes."""

    def __init__(self, entries: list[TensorEntry]) -> None:
        """Entries are named "<layer>/<matrix>/<array>"."""
        self._fields: dict[tuple[str, str], _Field] = {}
        self.nbytes = 0
        for entry in entries:
            _layer, matrix, array = entry.name.split("/")
            self._fields[matrix, array] = _Field(entry, self.nbytes)
            self.nbytes += padded(entry.nbytes)  # direct reads write whole blocks
        self.extent = [span for field in self._fields.values() for span in field.spans()]

    def weight(self, matrix: StoredMatrix, run: Tensor) -> Weight:
        """A matrix as a view of `run`, uint8 [nbytes] on the device."""
        return placed(matrix, lambda array: self._fields[matrix.name, array].within(run))


def open_packed(
    arrays: ShardArrays, weights: ShardWeights, device: Device, *, is_half: bool
) -> tuple[str, CachedShard]:
    """The cache key and the file of all layers' runs, which is made if it is missing.

    Raises RequestError without a folder for it, StoreFullError if the disk is full.
    """
    cache = weights.packed
    if cache is None:
        raise RequestError("there is no folder to keep packed weights in")
    key = f"triton {_VERSION} {is_half} {weights.manifest.digest}"
    found = cache.get(key)
    if found is not None:
        return key, found
    total_bytes = 2 * weights.manifest.total_bytes
    with cache.begin(key, total_bytes, made_of=weights.path.parent) as writer:
        for matrix in arrays.format.recipe.all_stored(arrays.layout.matrices):
            layer = _layer_of(matrix.name)
            if layer is not None:
                laid_out = gpu_arrays(arrays, matrix, device, is_half=is_half)
                if expert_number(matrix.name) is not None and "scales" in laid_out:
                    # One kernel takes all experts of a layer, so their scales must have one type;
                    # of the values that experts in the device's memory have.
                    laid_out["scales"] = laid_out["scales"].float()
                for name, array in laid_out.items():
                    writer.add(f"{layer}/{matrix.name}/{name}", from_device(array))
        return key, writer.finish()


def layer_runs(packed: CachedShard) -> dict[int, LayerRun]:
    """The runs of all layers, in order."""
    by_layer = groupby(packed.manifest.tensors, key=lambda entry: entry.name.split("/")[0])
    return {int(layer): LayerRun(list(entries)) for layer, entries in by_layer}


def _layer_of(matrix: str) -> int | None:
    """The layer of a matrix; None for the head."""
    parts = matrix.split(".")
    return int(parts[1]) if parts[0] == "layers" else None
