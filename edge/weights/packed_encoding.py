"""What a quantised folder's matrices are held in: the very codes that it has, where blocks can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from edge.kernels.matmul_nbits.reference import QuantizedMatrix
from edge.models.spec import ModelSpec, tensor_shapes
from edge.offload import WeightStore
from edge.progress import OnProgress
from edge.weights.encoding import Encoding, Rounded
from edge.weights.float_matrices import Floats
from edge.weights.integer_formats import head_kind, small_floats
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.packed_folder import PackedStore
from edge.weights.packed_matrix import CodedMatrix
from edge.weights.recipe import Kind, Recipe, rule_role
from edge.weights.rounded_head import HEAD_NOTE, with_rounded_head
from edge.weights.stored_blocks import StoredBlocks, recipe_of

_FINE_BITS = 8


def packed_encoding(
    store: WeightStore, spec: ModelSpec, tensor_name: Callable[[str], str]
) -> Encoding | Rounded | None:
    """None where all matrices are floats, and for tensors that do not fit, refused elsewhere."""
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
        if role != "embedding" and name in store.packed and rule_role(role) not in floats
    }
    coded = {role: each for role, each in packed.items() if isinstance(each, CodedMatrix)}
    if not packed:
        return None
    if len(coded) < len(packed):
        return Rounded(
            dtype="int8", because="the folder's floats of 8 bits, which no integers hold exactly"
        )
    if any(each.is_shuffled for each in coded.values()):
        fine = any(each.bits == _FINE_BITS for each in coded.values())
        return Rounded(
            dtype="int8" if fine else None,
            because="made of the folder's codes, whose groups are in act-order, by rounding again",
        )
    found = coded_recipe(spec, {role: each.kind for role, each in coded.items()})
    if found is None:
        return None
    recipe, grades = found

    def read(name: str, rows: range, columns: range) -> tuple[QuantizedMatrix, int]:
        matrix = store.packed[name]
        assert isinstance(matrix, CodedMatrix)
        return matrix.blocks(rows, columns)

    def open_source(
        tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        blocks = StoredBlocks(tensors, coded=frozenset(coded), read=read)
        if "head" in coded:
            return blocks
        return with_rounded_head(
            blocks, spec, tensors, cache_root=cache_root, on_progress=on_progress
        )

    note = "" if "head" in coded else HEAD_NOTE
    return Encoding(recipe=recipe, grades=grades, open=open_source, note=note)


def coded_recipe(
    spec: ModelSpec, coded: Mapping[str, Kind]
) -> tuple[Recipe, tuple[int, ...]] | None:
    """As `recipe_of`, where matrices of these roles are codes and all others floats.

    A head of floats is rounded.
    """
    kinds: dict[str, Kind] = {
        role: Floats()
        for role, shape in tensor_shapes(spec).items()
        if len(shape) == 2 and role != "embedding"
    }
    return recipe_of(spec, {**kinds, "head": head_kind(spec), **coded})
