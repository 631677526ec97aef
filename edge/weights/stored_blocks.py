"""Matrices that a checkpoint has as codes: their kinds, and their reading.

Knows no file formats; their modules give the kinds and read the codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from edge.errors import CheckpointError
from edge.kernels.matmul_nbits.reference import QuantizedMatrix, slice_columns, stacked
from edge.models.parts import MatrixSlice
from edge.models.spec import MAX_KINDS, ModelSpec
from edge.offload import StoreError
from edge.weights.block_matrices import stored_arrays
from edge.weights.float_matrices import FloatSource
from edge.weights.matrix_kind import CheckpointTensors
from edge.weights.recipe import MAX_MATRIX_KINDS, Kind, Recipe, Rule, rule_role
from edge.weights.weight_limits import check_weights, largest_of


class ReadCodes(Protocol):
    """Reads codes of one matrix by its tensor's name."""

    def __call__(self, name: str, rows: range, columns: range) -> tuple[QuantizedMatrix, int]:
        """These rows of at least all blocks with some of the columns, and their first column in the
        matrix. Raises StoreError, CheckpointError."""
        ...


def recipe_of(spec: ModelSpec, kinds: Mapping[str, Kind]) -> tuple[Recipe, tuple[int, ...]] | None:
    """The recipe for matrices of these kinds, by role, and the grades of the layers.

    Layers with different kinds of matrices have different grades. None for more grades than a
    format can have, or different experts in a layer; no published file has those.
    """
    layers: list[dict[str, Kind]] = [{} for _ in range(spec.num_layers)]
    for role, kind in kinds.items():
        if role.startswith("layers."):
            _layers, number, local = role.split(".", 2)
            if layers[int(number)].setdefault(rule_role(local), kind) != kind:
                return None
    unlike: list[dict[str, Kind]] = []
    for layer in layers:
        if layer not in unlike:
            unlike.append(layer)
    grades = tuple(map(unlike.index, layers))
    different = max(len(unlike), len(set(zip(spec.layers, grades, strict=True))))
    if different > MAX_KINDS or len(set(kinds.values())) > MAX_MATRIX_KINDS:
        return None
    usual = Counter(kinds.values()).most_common(1)[0][0]
    rules = [Rule("head", kinds["head"])]
    for local in dict.fromkeys(each for layer in unlike for each in layer):
        plain = local.removeprefix("shared.")
        if plain != local and all(each.get(local) in (None, each.get(plain)) for each in unlike):
            continue
        found = {grade: layer[local] for grade, layer in enumerate(unlike) if local in layer}
        if len(set(found.values())) == 1:
            rules += [Rule(local, kind) for kind in set(found.values())]
        else:
            rules += [Rule(local, kind, grade) for grade, kind in found.items()]
    # A shared expert without a rule would get the rule of other experts.
    kept = (rule for rule in rules if rule.kind != usual or rule.role.startswith("shared."))
    recipe = Recipe(usual, tuple(kept))
    return recipe, grades


class StoredBlocks(FloatSource):
    """Reads the matrices of `coded` roles as codes; the rest, and other matrices, as float32.

    Reading raises CheckpointError for invalid weights and damaged files.
    """

    def __init__(
        self, tensors: CheckpointTensors, *, coded: frozenset[str], read: ReadCodes
    ) -> None:
        super().__init__(tensors.store, tensors.tensor_name, tensors.norm_offset)
        self._coded = coded
        self._read_codes = read

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        if part.parts[0][0] not in self._coded:
            return super().matrix(part)
        pieces = [self._blocks(role, rows, part.columns) for role, rows in part.parts]
        return stored_arrays(stacked(pieces))

    def _blocks(self, role: str, rows: range, columns: range) -> QuantizedMatrix:
        name = self._tensor_name(role)
        try:
            whole, first = self._read_codes(name, rows, columns)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        largest = largest_of(whole.scales) * whole.zero_code
        if whole.offsets is not None:
            largest += largest_of(whole.offsets)
        check_weights(self._store, name, largest)
        if (first, whole.columns) == (columns.start, len(columns)):
            return whole
        return slice_columns(whole, range(columns.start - first, columns.stop - first))[0]
