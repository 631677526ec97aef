"""Encodings of quantised folders: the codes of the folder, if blocks can hold them.

If the columns of a group are scattered in a matrix (act-order), they are stored side by side, and
the product gets its inputs in that order. That works for matrices that are never cut by columns. Of
others a shard would have parts of every group, each too small for a block, so they are dequantized
exactly and rounded to 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import QuantizedMatrix
from edge.models.parts import MatrixSlice
from edge.models.spec import TABLES, ModelSpec, tensor_shapes
from edge.offload import WeightStore
from edge.progress import OnProgress
from edge.weights.block_matrices import Blocks
from edge.weights.encoding import Encoding, Rounded
from edge.weights.float_matrices import Floats
from edge.weights.integer_formats import head_kind, small_floats, widest_block
from edge.weights.layout import whole_layout
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.packed.block_matrix import BlockMatrix, BlockSource
from edge.weights.packed.folder import PackedStore
from edge.weights.packed.matrix import CodedMatrix
from edge.weights.recipe import Kind, Recipe, rule_role
from edge.weights.rounded_matrices import HEAD_NOTE, with_rounded
from edge.weights.stored_blocks import StoredBlocks, recipe_of

_FINE_BITS = 8
_ROUNDED_BLOCK, _LEAST_BLOCK = 64, 32
"""Columns of a block of matrices that become 8 bits, which devices divide in whole blocks."""
_SHUFFLED_NOTE = "matrices in act-order that devices divide by columns, in 8 bits"

Order = NDArray[np.int32]


def packed_encoding(
    store: WeightStore, spec: ModelSpec, tensor_name: Callable[[str], str]
) -> Encoding | Rounded | None:
    """The encoding; None for floats, and for wrong tensors, which are refused elsewhere."""
    if not isinstance(store, PackedStore):
        return None
    present = set(store.names())
    shapes = {role: shape for role, shape in tensor_shapes(spec).items() if len(shape) == 2}
    names = {role: tensor_name(role) for role in shapes}
    if any(
        names[role] not in present or store.shape(names[role]) != shape
        for role, shape in shapes.items()
    ):
        return None
    floats = {rule.role for rule in small_floats(spec)}
    packed = {
        role: store.packed[name]
        for role, name in names.items()
        if role not in TABLES and name in store.packed and rule_role(role) not in floats
    }
    coded = {role: each for role, each in packed.items() if isinstance(each, CodedMatrix)}
    if not packed:
        return None
    if len(coded) < len(packed):
        return Rounded(
            dtype="int8", because="the folder's floats of 8 bits, which no integers hold exactly"
        )
    kinds: dict[str, Blocks] = {role: each.kind for role, each in coded.items()}
    orders: dict[str, Order] = {}
    cut = _cut_in_act_order(spec, coded)
    uncut = {role: each for role, each in coded.items() if each.is_shuffled and role not in cut}
    for role, each in uncut.items():
        order = each.sorted_columns()
        if order is None:
            return _rounded_again(coded)
        orders[names[role]] = order
    for role, number in _numbers(spec, {role: orders[names[role]] for role in uncut}).items():
        kinds[role] = replace(kinds[role], order_number=number)
    rounded = {**cut, **({} if "head" in coded else {"head": head_kind(spec)})}
    found = coded_recipe(spec, {**kinds, **rounded})
    if found is None:
        return _rounded_again(coded) if orders or cut else None
    recipe, grades = found

    def read(name: str, rows: range, columns: range) -> tuple[QuantizedMatrix, int]:
        matrix = store.packed[name]
        assert isinstance(matrix, CodedMatrix)
        if name in orders:
            assert len(columns) == matrix.shape[1]
            return matrix.sorted_blocks(rows, orders[name]), 0
        return matrix.blocks(rows, columns)

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        blocks = StoredBlocks(tensors, coded=frozenset(coded.keys() - cut.keys()), read=read)
        return with_rounded(
            blocks, rounded, tensors, cache_root=cache_root, on_progress=on_progress
        )

    notes = [HEAD_NOTE] * ("head" in rounded) + [_SHUFFLED_NOTE] * bool(cut)
    packed_form = Encoding(recipe=recipe, grades=grades, open=open_source, note="; ".join(notes))
    in_blocks = {
        role: each
        for role, each in coded.items()
        if isinstance(each, BlockMatrix) and each.is_whole
    }
    own = coded_recipe(spec, {**{role: each.own for role, each in in_blocks.items()}, **rounded})
    if len(in_blocks) < len(coded) or own is None:
        return packed_form

    def open_own(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        blocks = BlockSource(tensors, in_blocks)
        return with_rounded(
            blocks, rounded, tensors, cache_root=cache_root, on_progress=on_progress
        )

    return replace(packed_form, recipe=own[0], grades=own[1], open=open_own, packed=packed_form)


def _rounded_again(coded: Mapping[str, CodedMatrix]) -> Rounded:
    fine = any(each.bits == _FINE_BITS for each in coded.values())
    return Rounded(
        dtype="int8" if fine else None,
        because="made of the folder's codes, whose groups are in act-order, by rounding again",
    )


def _cut_in_act_order(spec: ModelSpec, coded: Mapping[str, CodedMatrix]) -> dict[str, Blocks]:
    """The new kinds of matrices that devices divide by columns, by role."""
    found = [
        role
        for matrix in _matrices(spec)
        for role, _rows in matrix.parts
        if role in coded and coded[role].is_shuffled and _is_cut(spec, matrix)
    ]
    columns = math.gcd(*(coded[role].shape[1] for role in found))
    return dict.fromkeys(found, Blocks(8, widest_block(_ROUNDED_BLOCK, columns, _LEAST_BLOCK)))


def _numbers(spec: ModelSpec, orders: Mapping[str, Order]) -> dict[str, int]:
    """A number for each matrix, equal for fused matrices in the same order."""
    found: dict[str, int] = {}
    for matrix in _matrices(spec):
        known: list[bytes] = []
        for role, _rows in matrix.parts:
            if role in orders:
                order = orders[role].tobytes()
                if order not in known:
                    known.append(order)
                found[role] = known.index(order)
    return found


def _matrices(spec: ModelSpec) -> tuple[MatrixSlice, ...]:
    return whole_layout(spec).matrices


def _is_cut(spec: ModelSpec, matrix: MatrixSlice) -> bool:
    """Whether a stage divides a matrix by columns and not by rows."""
    _layers, number, _name = f"{matrix.name}..".split(".", 2)
    if not number.isdigit():
        return False
    layer, prefix = spec.layer(int(number)), f"layers.{number}."
    parts = (part for part in (layer.mixer, layer.feed_forward) if part is not None)
    few = [
        each
        for part in parts
        for each in part.matrices(prefix, spec.hidden_size, range(1))
        if each.name == matrix.name
    ]
    return any(len(each.columns) < len(matrix.columns) for each in few)


def coded_recipe(
    spec: ModelSpec, coded: Mapping[str, Kind]
) -> tuple[Recipe, tuple[int, ...]] | None:
    """As `recipe_of`, if matrices of these roles are codes and all others floats.

    A head of floats is rounded.
    """
    kinds: dict[str, Kind] = {
        role: Floats()
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role not in TABLES
    }
    return recipe_of(spec, {**kinds, "head": head_kind(spec), **coded})
