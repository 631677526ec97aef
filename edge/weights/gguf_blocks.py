"""Weights of a GGUF file in the very codes that it holds.

Every type that is read has codes of at most 8 bits in runs that share a scale, some with an offset
too. So they are the blocks of a kernel's own layout, only placed otherwise: no weight changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.models.parts import MatrixSlice, VectorSlice
from edge.models.spec import MAX_KINDS, ModelSpec, tensor_shapes
from edge.progress import OnProgress
from edge.weights.block_matrices import Blocks, OffsetBlocks, stored_arrays
from edge.weights.encoding import Encoding
from edge.weights.float_matrices import Floats, FloatSource
from edge.weights.matrix_kind import CheckpointTensors
from edge.weights.recipe import Kind, Recipe, Rule
from edge.weights.weight_limits import check_weights, largest_of
from kernels.matmul_nbits.reference import QuantizedMatrix, pack, slice_columns
from offload import BlockType, GgufStore, StoreError

_CHUNK_WEIGHTS = 1 << 22
"""Unpacked at once: a weight takes some ten bytes meanwhile."""


def gguf_encoding(
    store: GgufStore, spec: ModelSpec, tensor_name: Callable[[str], str]
) -> Encoding | None:
    """What the file itself holds its matrices in; None where all are plain floats, and where more
    layers are unlike than models have kinds.

    Layers whose matrices are not all of the same types as those of others are of another grade.
    """
    types = {
        role: store.block_type(tensor_name(role))
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role != "embedding"
    }
    if all(each.coded is None for each in types.values()):
        return None
    kinds = {role: _kind(each) for role, each in types.items()}
    layers: list[dict[str, Kind]] = [{} for _ in range(spec.num_layers)]
    for role, kind in kinds.items():
        if role.startswith("layers."):
            _layers, number, local = role.split(".", 2)
            layers[int(number)][local] = kind
    unlike: list[dict[str, Kind]] = []
    for layer in layers:
        if layer not in unlike:
            unlike.append(layer)
    if len(unlike) > MAX_KINDS:  # no quantiser's work; it is rounded like floats then
        return None
    usual = Counter(kinds.values()).most_common(1)[0][0]
    rules = [Rule("head", kinds["head"])]
    for local in unlike[0]:
        found = [layer[local] for layer in unlike]
        if len(set(found)) == 1:
            rules.append(Rule(local, found[0]))
        else:
            rules += [Rule(local, kind, grade) for grade, kind in enumerate(found)]
    recipe = Recipe(usual, tuple(rule for rule in rules if rule.kind != usual))

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> StoredBlocks:
        return StoredBlocks(store, tensors, types)

    return Encoding(recipe=recipe, grades=tuple(map(unlike.index, layers)), open=open_source)


class StoredBlocks:
    """Reads matrices as the file's codes; the rest, and matrices of floats, as float32."""

    def __init__(
        self, store: GgufStore, tensors: CheckpointTensors, types: Mapping[str, BlockType]
    ) -> None:
        self._store = store
        self._types = types
        self._tensor_name = tensors.tensor_name
        self._floats = FloatSource(tensors.store, tensors.tensor_name)

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        if self._types[part.parts[0][0]].coded is None:
            return self._floats.matrix(part)
        return stored_arrays([self._read(role, rows, part.columns) for role, rows in part.parts])

    def vector(self, part: VectorSlice) -> NDArray[np.float32]:
        return self._floats.vector(part)

    def embedding(self, rows: range) -> NDArray[Any]:
        return self._floats.embedding(rows)

    def close(self) -> None:
        """Nothing of its own is open."""

    def _read(self, role: str, rows: range, columns: range) -> QuantizedMatrix:
        name, block = self._tensor_name(role), self._types[role]
        size = block.block_size
        blocks = range(columns.start // size, -(-columns.stop // size))
        step = max(1, _CHUNK_WEIGHTS // (len(blocks) * size))
        parts = [
            self._few(name, block, range(row, min(row + step, rows.stop)), blocks)
            for row in range(rows.start, rows.stop, step)
        ]
        whole = _joined(parts)
        first = blocks.start * size
        if (first, whole.columns) == (columns.start, len(columns)):
            return whole
        return slice_columns(whole, range(columns.start - first, columns.stop - first))[0]

    def _few(self, name: str, block: BlockType, rows: range, blocks: range) -> QuantizedMatrix:
        try:
            raw = self._store.blocks(name, rows, blocks)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        matrix = as_matrix(block, raw)
        largest = largest_of(matrix.scales) * matrix.zero_code
        if matrix.offsets is not None:
            largest += largest_of(matrix.offsets)
        check_weights(self._store, name, largest)
        return matrix


def as_matrix(block: BlockType, raw: NDArray[np.uint8]) -> QuantizedMatrix:
    """Raw blocks uint8 [rows, blocks, bytes of a block] as the matrix that they stand for."""
    coded = block.coded
    assert coded is not None
    found = block.codes(raw)
    values, offsets = found.values, found.offsets
    if coded.shift:
        assert offsets is not None
        values = values + np.int8(coded.shift)
        with np.errstate(over="ignore", invalid="ignore"):  # no number: the caller looks
            offsets = offsets - np.float32(coded.shift) * found.scales
    # Wraps: -128 and 128 are one byte.
    codes = values.view(np.uint8) + np.uint8(1 << (coded.bits - 1))
    return QuantizedMatrix(
        codes=pack(codes & np.uint8((1 << coded.bits) - 1), coded.bits),
        scales=found.scales,
        offsets=offsets,
        bits=coded.bits,
        block_size=coded.run,
        columns=raw.shape[1] * block.block_size,
    )


def _kind(block: BlockType) -> Kind:
    if block.coded is None:
        return Floats()
    kind = OffsetBlocks if block.coded.has_offsets else Blocks
    return kind(block.coded.bits, block.coded.run)


def _joined(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Rows under each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    offsets = [each.offsets for each in parts if each.offsets is not None]
    return QuantizedMatrix(
        codes=np.concatenate([each.codes for each in parts]),
        scales=np.concatenate([each.scales for each in parts]),
        offsets=np.concatenate(offsets) if offsets else None,
        bits=first.bits,
        block_size=first.block_size,
        columns=first.columns,
    )
