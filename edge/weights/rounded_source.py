"""Matrices of a checkpoint's floats, rounded once into a cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import RequestError
from edge.host import block_kernels
from edge.kernels.matmul_nbits.reference import stacked
from edge.models.parts import MatrixSlice
from edge.progress import OnProgress, Progress
from edge.weights.block_matrices import Blocks, stored_arrays
from edge.weights.block_rounding import BlockRounding
from edge.weights.encoding import Encoding
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import FloatSource
from edge.weights.matrix_kind import CheckpointTensors
from edge.weights.quantize import open_quantized
from edge.weights.quantized_store import QuantizedFormat, QuantizedStore, Rounding
from edge.weights.recipe import Kind, Recipe


class QuantizedSource(FloatSource):
    """Matrices from quantised caches, one for each kind; the rest as float32."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        recipe: Recipe,
        quantized: Mapping[Kind, QuantizedStore],
    ) -> None:
        super().__init__(tensors.store, tensors.tensor_name, tensors.norm_offset)
        self._recipe = recipe
        self._quantized = quantized

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        role, rows = part.parts[0]
        kind = self._recipe.kind(role, part.grade)
        store = self._quantized.get(kind)
        if store is None:
            return super().matrix(part)
        if isinstance(kind, FileBlocks):
            blocks = kind.blocks_of(part.columns)
            found = [
                store.arrays(self._tensor_name(role), (rows, blocks))["blocks"]
                for role, rows in part.parts
            ]
            return kind.stored(np.concatenate(found))
        name = self._tensor_name(role)
        whole_rows, whole_columns = store.matrix(name)
        if len(part.columns) != whole_columns:
            assert rows == range(whole_rows)
            assert len(part.parts) == 1
            matrix, _padding = store.columns(name, part.columns)
            return stored_arrays(matrix)
        pieces = [store.rows(self._tensor_name(role), rows) for role, rows in part.parts]
        return stored_arrays(stacked(pieces))

    def unrounded(self, part: MatrixSlice) -> NDArray[np.float32]:
        weights: NDArray[np.float32] = super().matrix(part)["weight"]
        return weights

    def close(self) -> None:
        for store in self._quantized.values():
            store.close()


def _rounding(kind: Kind) -> Rounding | None:
    if isinstance(kind, FileBlocks):
        if block_kernels.library() is None:
            raise RequestError(
                "this device cannot round weights to blocks of files",
                remedy='install the library: pip install "edge-inference[fast]"',
            )
        return BlockRounding(kind.form)
    if not isinstance(kind, Blocks):
        return None
    return QuantizedFormat(bits=kind.bits, block_size=kind.block_size, zero_points=kind.zero_points)


def mixed(recipe: Recipe, grades: tuple[int, ...] = ()) -> Encoding:
    """An encoding whose matrices of blocks are quantised once as a whole, and read from a cache."""

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> QuantizedSource:
        names: dict[Kind, list[str]] = {}
        for role, grade in tensors.matrices.items():
            names.setdefault(recipe.kind(role, grade), []).append(tensors.tensor_name(role))
        shapes = {name: tensors.store.shape(name) for each in names.values() for name in each}
        total, before = sum(map(math.prod, shapes.values())), 0
        with contextlib.ExitStack() as on_error:
            quantized: dict[Kind, QuantizedStore] = {}
            for kind, members in names.items():
                rounding = _rounding(kind)
                if rounding is not None:
                    quantized[kind] = open_quantized(
                        tensors.store,
                        sorted(members),
                        rounding,
                        cache_root=cache_root,
                        progress=_Part(on_progress=on_progress, before=before, total=total),
                    )
                    on_error.callback(quantized[kind].close)
                before += sum(math.prod(shapes[name]) for name in members)
            on_error.pop_all()
        return QuantizedSource(tensors, recipe, quantized)

    return Encoding(recipe=recipe, grades=grades, open=open_source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Progress of one kind's matrices, as a part of the whole progress."""

    on_progress: OnProgress
    before: int
    total: int

    def __call__(self, done: int, _total: int) -> None:
        done += self.before
        self.on_progress(Progress(phase="quantise", peer="", done=done, total=self.total))
