"""A head that a checkpoint of codes has in floats: rounded to 8 bits.

In float32 it would take four times the memory, and all of it is read for each token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge.models.parts import MatrixSlice
from edge.models.spec import ModelSpec
from edge.progress import OnProgress
from edge.weights.block_matrices import mixed
from edge.weights.float_matrices import Floats
from edge.weights.integer_formats import head_kind
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.recipe import Recipe, Rule

HEAD_NOTE = "the head, which is in floats there, in 8 bits"
"""What people are told."""


def with_rounded_head(
    rest: WeightSource,
    spec: ModelSpec,
    tensors: CheckpointTensors,
    *,
    cache_root: Path,
    on_progress: OnProgress,
) -> WeightSource:
    """`rest`, but for the head: of the kind `head_kind`, rounded once into the cache."""
    only_head = CheckpointTensors(
        store=tensors.store, tensor_name=tensors.tensor_name, matrices={"head": 0}
    )
    rounded = mixed(Recipe(Floats(), (Rule("head", head_kind(spec)),)))
    return _WithHead(rest, rounded.open(only_head, cache_root=cache_root, on_progress=on_progress))


class _WithHead:
    """Two sources: one of the head, one of everything else."""

    def __init__(self, rest: WeightSource, head: WeightSource) -> None:
        self._head = head
        self.vector = rest.vector
        self.embedding = rest.embedding
        self._rest = rest

    def matrix(self, part: MatrixSlice) -> dict[str, NDArray[Any]]:
        source = self._head if part.parts[0][0] == "head" else self._rest
        return source.matrix(part)

    def close(self) -> None:
        self._head.close()
        self._rest.close()
