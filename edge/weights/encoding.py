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
        """Make the source. Slow conversions are cached below `cache_root`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The matrices that a format makes of a checkpoint."""

    recipe: Recipe
    grades: tuple[int, ...] = ()
    """The grade of each layer, which selects rules of the recipe; empty if all layers are alike."""
    open: OpenSource
    note: str = ""
    """A note for people, in addition to the kinds of its matrices."""
    packed: Encoding | None = None
    """The same weights for devices that lack kernels for these; None: every device has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """The format to which quantised weights without a kernel are rounded.

    dtype: a format's name; None: the default. because: the reason, for people.
    """

    dtype: str | None
    because: str
