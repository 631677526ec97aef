"""Rounds matrices of a quantised checkpoint that kernels cannot take as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.models.parts import MatrixSlice
from edge.progress import OnProgress
from edge.weights.block_matrices import Blocks
from edge.weights.float_matrices import Floats
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.recipe import Recipe, Rule, rule_role
from edge.weights.rounded_source import mixed

HEAD_NOTE = "the head, which is in floats there, in 8 bits"
"""The note about the head. In float32 it would take four times the memory, all of which is read for
each token."""


def with_rounded(
    rest: WeightSource,
    kinds: Mapping[str, Blocks],
    tensors: CheckpointTensors,
    *,
    cache_root: Path,
    on_progress: OnProgress,
) -> WeightSource:
    """`rest`, with matrices of these roles rounded to these kinds, once, into the cache.

    A role is of the same kind in all layers.
    """
    if not kinds:
        return rest
    only = CheckpointTensors(
        store=tensors.store, tensor_name=tensors.tensor_name, matrices=dict.fromkeys(kinds, 0)
    )
    rules = dict.fromkeys(Rule(rule_role(role), kind) for role, kind in kinds.items())
    rounded = mixed(Recipe(Floats(), tuple(rules)))
    return _Two(
        rest, frozenset(kinds), rounded.open(only, cache_root=cache_root, on_progress=on_progress)
    )


class _Two:
    """Two sources as one: one for matrices of some roles, the other for the rest."""

    def __init__(self, rest: WeightSource, roles: frozenset[str], rounded: WeightSource) -> None:
        self._rounded = rounded
        self._roles = roles
        self.vector = rest.vector
        self.table = rest.table
        self._rest = rest

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        return self._source(part).matrix(part)

    def unrounded(self, part: MatrixSlice) -> NDArray[np.float32] | None:
        return self._source(part).unrounded(part)

    def _source(self, part: MatrixSlice) -> WeightSource:
        return self._rounded if part.parts[0][0] in self._roles else self._rest

    def close(self) -> None:
        self._rounded.close()
        self._rest.close()
