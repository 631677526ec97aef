"""Weights of a GGUF file in their own codes.

All supported types have codes of at most 8 bits in runs that share a scale, and some an offset. So
kernels can compute with the same blocks in another layout, and no weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.kernels.matmul_blocks.reference import FORMS, BlockForm, BlockParts
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, pack, stacked
from edge.models.parts import MatrixSlice
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.offload import BlockType, GgufStore, StoreError
from edge.progress import OnProgress
from edge.weights.block_matrices import Blocks
from edge.weights.block_rounding import largest_weight
from edge.weights.encoding import Encoding
from edge.weights.file_blocks import FileBlocks
from edge.weights.float_matrices import Floats
from edge.weights.fused_rows import Steps, TensorPart
from edge.weights.gguf.file_blocks import read_blocks
from edge.weights.integer_formats import head_kind, small_floats
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.recipe import Kind, rule_role
from edge.weights.rounded_matrices import HEAD_NOTE, with_rounded
from edge.weights.stored_blocks import StoredBlocks, recipe_of
from edge.weights.weight_limits import check_weights

_CHUNK_WEIGHTS = 1 << 22
"""Weights that are unpacked at once, which takes about ten bytes each."""


def gguf_encoding(
    store: GgufStore,
    spec: ModelSpec,
    tensor_name: Callable[[str], str],
    parts: Mapping[str, TensorPart],
) -> Encoding | None:
    """The file's own encoding; None if all matrices are plain floats. A head of floats is rounded.

    parts: names of roles' tensors that are parts of others.
    """
    floats = {rule.role for rule in small_floats(spec)}
    names = {
        role: tensor_name(role)
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role not in TABLES
    }
    types = {
        role: store.block_type(parts[name].tensor if name in parts else name)
        for role, name in names.items()
    }
    coded = frozenset(
        role
        for role, each in types.items()
        if rule_role(role) not in floats and _has_codes(each, parts.get(names[role]))
    )
    if not coded:
        return None
    rounded = {} if "head" in coded else {"head": head_kind(spec)}
    shapes = tensor_shapes(spec)
    as_stored = {
        role: types[role].name
        for role in coded
        if types[role].name in FORMS
        and keeps_blocks(types[role], parts.get(names[role]), columns=shapes[role][1])
    }

    def encoding(as_stored: Mapping[str, str], packed: Encoding | None) -> Encoding | None:
        kinds: dict[str, Kind] = {
            role: _kind(each) if role in coded else Floats() for role, each in types.items()
        }
        kinds |= {role: FileBlocks(name) for role, name in as_stored.items()}
        found = recipe_of(spec, kinds | rounded)
        if found is None:
            return packed

        def open_source(
            tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
        ) -> WeightSource:
            blocks = GgufBlocks(tensors, store, parts, coded=coded, as_stored=as_stored)
            return with_rounded(
                blocks, rounded, tensors, cache_root=cache_root, on_progress=on_progress
            )

        recipe, grades = found
        note = HEAD_NOTE if rounded else ""
        return Encoding(recipe=recipe, grades=grades, open=open_source, note=note, packed=packed)

    packed = encoding({}, None)
    return encoding(as_stored, packed) if as_stored else packed


class GgufBlocks(StoredBlocks):
    """Reads the matrices of `as_stored` roles, to the names of their types, as blocks of the file;
    others of `coded` roles as codes, and the rest as float32."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        store: GgufStore,
        parts: Mapping[str, TensorPart],
        *,
        coded: frozenset[str],
        as_stored: Mapping[str, str],
    ) -> None:
        super().__init__(tensors, coded=coded, read=partial(_read, store, parts))
        self._file = store
        self._parts = parts
        self._as_stored = as_stored

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        form = FORMS.get(self._as_stored.get(part.parts[0][0], ""))
        if form is None:
            return super().matrix(part)
        kind = FileBlocks(form.name)
        whole = kind.blocks_of(part.columns)
        pieces = self._pieces(form, part, whole)
        return kind.of_parts(pieces, part.num_rows, len(whole) * form.block_size)

    def _pieces(self, form: BlockForm, part: MatrixSlice, whole: range) -> Iterator[BlockParts]:
        for role, rows in part.parts:
            name = self._tensor_name(role)
            own = self._parts.get(name)
            block = self._file.block_type(name if own is None else own.tensor)
            count = form.block_size // block.block_size
            blocks = range(whole.start * count, whole.stop * count)
            try:
                for raw in _raw_rows(self._file, own, name, rows, blocks):
                    each = read_blocks(form, block, raw)
                    check_weights(self._store, name, largest_weight(form, each))
                    yield each
            except StoreError as error:
                raise CheckpointError(str(error)) from error


def keeps_blocks(block: BlockType, part: TensorPart | None, *, columns: int) -> bool:
    """Whether a row is whole blocks of the operator's form, which can be put into the part's
    order."""
    size = FORMS[block.name].block_size
    order = None if part is None else part.columns
    return columns % size == 0 and (order is None or order.counts[-1] % size == 0)


def _raw_rows(
    store: GgufStore, part: TensorPart | None, name: str, rows: range, blocks: range
) -> Iterator[NDArray[np.uint8]]:
    """Raw blocks uint8 [rows, blocks, bytes of a block], a piece of rows at a time."""
    name, runs = _runs(store, name, part, rows)
    size = store.block_type(name).block_size
    order: slice | list[int] = slice(None)
    if part is not None and part.columns is not None:
        whole = part.columns.runs(range(part.columns.count))
        places = [block for run in whole for block in range(run.start // size, run.stop // size)]
        order, blocks = places[blocks.start : blocks.stop], range(store.shape(name)[1] // size)
    step = max(1, _CHUNK_WEIGHTS // (len(blocks) * size))
    for run in runs:
        for row in range(run.start, run.stop, step):
            yield store.blocks(name, range(row, min(row + step, run.stop)), blocks)[:, order]


def _has_codes(block: BlockType, part: TensorPart | None) -> bool:
    """Whether the blocks can be put into the part's order unchanged."""
    if block.coded is None:
        return False
    columns = None if part is None else part.columns
    return columns is None or columns.counts[-1] % block.coded.run == 0


def _runs(
    store: GgufStore, name: str, part: TensorPart | None, rows: range
) -> tuple[str, list[range]]:
    """The tensor in the file, and runs of these rows in it, numbered across stacked matrices."""
    if part is None or part.height is not None or part.new_axis is not None:
        return name, [rows]
    first = 0 if part.number is None else part.number * store.shape(part.tensor)[1]
    runs = part.runs(rows)
    return part.tensor, [range(first + run.start, first + run.stop) for run in runs]


def _read(
    store: GgufStore, parts: Mapping[str, TensorPart], name: str, rows: range, columns: range
) -> tuple[QuantizedMatrix, int]:
    part = parts.get(name)
    name, runs = _runs(store, name, part, rows)
    block = store.block_type(name)
    size = block.block_size
    order = None if part is None else part.columns
    if order is not None:
        columns = range(store.shape(name)[1])
    blocks = range(columns.start // size, -(-columns.stop // size))
    step = max(1, _CHUNK_WEIGHTS // (len(blocks) * size))
    found = stacked(
        [
            as_matrix(block, store.blocks(name, range(row, min(row + step, run.stop)), blocks))
            for run in runs
            for row in range(run.start, run.stop, step)
        ]
    )
    if order is not None:
        found = _in_order(found, order)
    return found, blocks.start * size


def _in_order(matrix: QuantizedMatrix, columns: Steps) -> QuantizedMatrix:
    """The matrix with its columns in the part's order of heads."""
    runs = columns.runs(range(columns.count))
    size = matrix.block_size
    order = [block for run in runs for block in range(run.start // size, run.stop // size)]
    offsets = matrix.offsets
    return replace(
        matrix,
        codes=matrix.codes[:, order],
        scales=matrix.scales[:, order],
        offsets=None if offsets is None else offsets[:, order],
    )


def as_matrix(block: BlockType, raw: NDArray[np.uint8]) -> QuantizedMatrix:
    """The matrix of raw blocks uint8 [rows, blocks, bytes of a block]."""
    coded = block.coded
    assert coded is not None
    found = block.codes(raw)
    values, offsets = found.values, found.offsets
    if coded.shift:
        assert offsets is not None
        values = values + np.int8(coded.shift)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for NaN
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
    return Blocks(block.coded.bits, block.coded.run, offsets=block.coded.has_offsets)
