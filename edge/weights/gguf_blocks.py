"""Weights of a GGUF file in the very codes that it holds.

Every type that is read has codes of at most 8 bits in runs that share a scale, some with an offset
too. So they are the blocks of a kernel's own layout, only placed otherwise: no weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import QuantizedMatrix, pack, stacked
from edge.models.spec import ModelSpec, tensor_shapes
from edge.offload import BlockType, GgufStore
from edge.progress import OnProgress
from edge.weights.block_matrices import Blocks, OffsetBlocks
from edge.weights.encoding import Encoding
from edge.weights.float_matrices import Floats
from edge.weights.fused_rows import RowsOfOne, SomeRows, TensorPart
from edge.weights.integer_formats import small_floats
from edge.weights.matrix_kind import CheckpointTensors
from edge.weights.recipe import Kind, rule_role
from edge.weights.stored_blocks import StoredBlocks, recipe_of

_CHUNK_WEIGHTS = 1 << 22
"""Unpacked at once: a weight takes some ten bytes meanwhile."""


def gguf_encoding(
    store: GgufStore,
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    parts: Mapping[str, TensorPart],
) -> Encoding | None:
    """What the file itself holds its matrices in; None where all are plain floats.

    parts: names of roles' tensors that are parts of others.
    """
    floats = {rule.role for rule in small_floats(spec)}
    types = {
        role: store.block_type(_place(store, tensor_name(role), parts)[0])
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role != "embedding"
    }
    coded = frozenset(
        role
        for role, each in types.items()
        if each.coded is not None and rule_role(role) not in floats
    )
    if not coded:
        return None
    kinds = {role: _kind(each) if role in coded else Floats() for role, each in types.items()}
    found = recipe_of(spec, kinds)
    if found is None:
        return None
    recipe, grades = found

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> StoredBlocks:
        return StoredBlocks(tensors, coded=coded, read=partial(_read, store, parts))

    return Encoding(recipe=recipe, grades=grades, open=open_source)


def _place(store: GgufStore, name: str, parts: Mapping[str, TensorPart]) -> tuple[str, int]:
    """The tensor in the file, and its first row of these, counted through stacked matrices."""
    match parts.get(name):
        case SomeRows(tensor=tensor, rows=rows):
            return tensor, rows.start
        case RowsOfOne(tensor=tensor, number=number, rows=rows):
            return tensor, number * store.shape(tensor)[1] + rows.start
        case None:
            return name, 0
        case part:  # numbers of its own for each expert, or one row: never matrices of codes
            return part.tensor, 0


def _read(
    store: GgufStore, parts: Mapping[str, TensorPart], name: str, rows: range, columns: range
) -> tuple[QuantizedMatrix, int]:
    name, first = _place(store, name, parts)
    rows = range(first + rows.start, first + rows.stop)
    block = store.block_type(name)
    size = block.block_size
    blocks = range(columns.start // size, -(-columns.stop // size))
    step = max(1, _CHUNK_WEIGHTS // (len(blocks) * size))
    pieces = [
        as_matrix(block, store.blocks(name, range(row, min(row + step, rows.stop)), blocks))
        for row in range(rows.start, rows.stop, step)
    ]
    return stacked(pieces), blocks.start * size


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
