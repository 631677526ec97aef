"""Encodings of weight formats: the kinds of matrices that they make of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge.progress import OnProgress
from edge.weights.matrix_kind import CheckpointTensors, WeightSource
from edge.weights.recipe import Recipe


class OpenSource(Protocol):
    def __call__(
        self, tensors: CheckpointTensors, *, cache_root: Path, on_progress: OnProgress
    ) -> WeightSource:
        """What takes long is done once, and kept below `cache_root`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The matrices that a format makes of a checkpoint."""

    recipe: Recipe
    grades: tuple[int, ...] = ()
    """By layer, which rules of the recipe count for it; none where all layers are alike."""
    open: OpenSource
    note: str = ""
    """What people are told of it, where the kinds of its matrices do not say all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """The format that quantised weights become, if no kernel computes with them as they are.

    dtype: a format's name; None: as any checkpoint's. because: a reason for people.
    """

    dtype: str | None
    because: str
