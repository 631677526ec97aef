"""The weights of a tower: its names in a checkpoint, the slices in its file, and its format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import CheckpointError
from edge.models.parts import MatrixSlice, VectorSlice, layer_number, whole_vector
from edge.models.spec import ModelSpec
from edge.models.towers.families import TowerFamily, read_tower
from edge.models.towers.part import TowerPart
from edge.models.towers.tower import BOUNDED, BOUNDS, NO_BOUND, Tower
from edge.offload import StoreError, WeightStore
from edge.weights.formats import WeightFormat, weight_format
from edge.weights.fused_rows import fused_rows, rows_of, with_fused_rows
from edge.weights.layout import ShardLayout, whole_layout
from edge.weights.picture_files import PictureFiles, picture_files


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerForm:
    """A tower in a checkpoint. tensor_name: by role. store: has these tensors."""

    tower: Tower
    files: PictureFiles
    tensor_name: Callable[[str], str]
    store: WeightStore


def tower_layout(part: TowerPart) -> ShardLayout:
    """The layout of a part of a tower. The matrix of patches, tables, and matrices that a
    checkpoint has turned are vectors, which stay float32."""
    tower, layers = part.tower, part.layers
    of_layers, shapes = whole_layout(tower.encoder), part.shapes()

    def is_here(name: str) -> bool:
        return name.startswith("layers.") and layer_number(name) in layers

    matrices = [
        each
        for whole in of_layers.matrices
        if is_here(whole.name)
        for each in ([whole] if not tower.bounds else _apart(whole))
    ]
    vectors = [each for each in of_layers.vectors if is_here(each.name)]
    turned = {
        f"{prefix}{number}.weight"
        for prefix, merger in part.mergers
        for number, each in enumerate(merger.projections)
        if each.is_turned
    }
    for name in ("patches", "positions"):
        if roles := [role for role in shapes if role.split(".")[0] == name]:
            parts = tuple((role, range(shapes[role][0])) for role in roles)
            vectors.append(VectorSlice(name=name, parts=parts, row_size=shapes[roles[0]][1]))
    for role, shape in shapes.items():
        if role.startswith(("layers.", "patches", "positions")):
            continue
        if len(shape) == 1:
            vectors.append(whole_vector(role, shape[0]))
        elif role in turned:
            rows = ((role, range(shape[0])),)
            vectors.append(VectorSlice(name=role, parts=rows, row_size=shape[1]))
        else:
            name = role.removesuffix(".weight")
            rows, columns = ((role, range(shape[0])),), range(shape[1])
            matrices.append(MatrixSlice(name=name, parts=rows, columns=columns))
    return replace(
        of_layers,
        layers=layers,
        kinds=tower.encoder.layers[layers.start : layers.stop],
        cache_layers=tuple(layers),
        matrices=tuple(matrices),
        vectors=tuple(vectors),
        vocab=range(0),
        embedding=range(0),
    )


def _apart(whole: MatrixSlice) -> list[MatrixSlice]:
    """The matrices of a fused one, by the names of their roles."""
    rows: dict[str, int] = {}
    for role, some in whole.parts:
        rows[role] = rows.get(role, 0) + len(some)
    return [
        replace(whole, name=role.removesuffix(".weight"), parts=((role, range(count)),))
        for role, count in rows.items()
    ]


def tower_format(tower: Tower, model_format: WeightFormat) -> WeightFormat:
    """The format of the tower of a model in this format: float32 as the model, else int8."""
    name = "float32" if model_format.name == "float32" else "int8"
    return weight_format(tower.encoder, name, accuracy=model_format.accuracy)


def tower_bytes(part: TowerPart, tower_format: WeightFormat) -> int:
    """Bytes of its weights in memory."""
    layout = tower_layout(part)
    stored = tower_format.recipe.all_stored(layout.matrices)
    vectors = sum(each.num_elements for each in layout.vectors)
    return round(sum(each.packed_bytes for each in stored)) + 4 * vectors


def tower_in_folder(
    config: Mapping[str, Any], folder: Path, store: WeightStore, model: ModelSpec, *, source: str
) -> TowerForm | None:
    """The tower of a folder's model; None for a text model, a tower that is not known, or one whose
    weights are not there. Raises CheckpointError."""
    files = picture_files(folder, config)
    found = read_tower(config, files.picture.values, model, source=source)
    if found is None:
        return None
    family, tower = found
    name = family.tensor_name(store.names())
    if name("patches") not in store.names():
        return None
    tower = with_bounds(family, tower, name, store)
    store = with_parts(family, tower, name, store)
    return TowerForm(tower=tower, files=files, tensor_name=name, store=store)


def with_bounds(
    family: TowerFamily, tower: Tower, name: Callable[[str], str], store: WeightStore
) -> Tower:
    """The tower with the bounds of its products, if the checkpoint has some. Raises
    CheckpointError."""
    if not family.is_bounded or name("layers.0.query.input_min") not in store.names():
        return tower
    return replace(tower, bounds=_bounds(tower, name, store))


def _bounds(
    tower: Tower, name: Callable[[str], str], store: WeightStore
) -> tuple[tuple[float, ...], ...]:
    """See `Tower.bounds`. Raises CheckpointError."""

    def one(role: str) -> float:
        try:
            found = store.read(name(role)).astype(np.float32).reshape(-1)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        if found.size != 1 or np.isnan(found[0]):
            raise CheckpointError(
                f"{store.where(name(role))}: tensor {name(role)} is not one number",
                remedy="download the model again",
            )
        return float(np.clip(found[0], -NO_BOUND, NO_BOUND))

    each = [f"{product}.{bound}" for product in BOUNDED for bound in BOUNDS]
    numbers = range(tower.encoder.num_layers)
    return tuple(tuple(one(f"layers.{n}.{role}") for role in each) for n in numbers)


def with_parts(
    family: TowerFamily, tower: Tower, name: Callable[[str], str], store: WeightStore
) -> WeightStore:
    """The store, with parts of fused and stacked tensors as tensors."""
    parts = fused_rows(family.fused, tower.encoder, name)
    shapes = tower.shapes()
    for whole, roles in family.stacked.items():
        for number, role in enumerate(roles):
            parts[name(role)] = rows_of(name(whole), range(shapes[role][0]), number=number)
    return with_fused_rows(store, parts)


def matrix_roles(tower: Tower) -> dict[str, int]:
    """The roles of its matrices, and their grade."""
    matrices = tower_layout(TowerPart.whole(tower)).matrices
    return {role: 0 for each in matrices for role, _rows in each.parts}


def check_tower(form: TowerForm, path: Path) -> None:
    """Raises CheckpointError for a tensor of the tower that is missing, or of another size."""
    present = set(form.store.names())
    for role, shape in form.tower.shapes().items():
        name = form.tensor_name(role)
        found = form.store.shape(name) if name in present else ()
        if role.startswith("patches") and len(found) > 2:  # of a convolution
            found = found[0], math.prod(found[1:])
        if found != shape:
            told = f"has shape {list(found)}, not {list(shape)}" if found else "is missing"
            raise CheckpointError(
                f"{path}: tensor {name} of the tower {told}", remedy="download the model again"
            )
