"""Rounds floats to the blocks of files, by the library of `kernels/native`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.host.block_kernels import round_blocks
from edge.kernels.matmul_blocks.reference import BlockForm, BlockParts, row_blocks
from edge.weights.weight_limits import largest_of

_VERSION = 1
"""Part of the cache's name: raise it when the library rounds differently."""


@dataclass(frozen=True, slots=True)
class BlockRounding:
    """A `Rounding` to blocks of a type without a table. Devices without the library have none."""

    form: BlockForm

    @property
    def key(self) -> str:
        return f"{self.form.name.lower()}-r{_VERSION}"

    def arrays(self, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Blocks as `row_blocks` has them; columns past the end are 0."""
        return {"blocks": ("U8", (rows, -(-columns // self.form.block_size), self.form.row_bytes))}

    def rounded(self, weight: NDArray[np.generic]) -> tuple[dict[str, NDArray[Any]], float]:
        rows, columns = weight.shape
        padded = np.zeros((rows, columns + -columns % self.form.block_size), np.float32)
        padded[:, :columns] = weight
        if not np.isfinite(padded).all():
            raise ValueError("it has weights that are not finite")
        parts = round_blocks(self.form, padded)
        return {"blocks": row_blocks(self.form, parts)}, largest_weight(self.form, parts)


def largest_weight(form: BlockForm, parts: BlockParts) -> float:
    """No weight is larger than this; NaN or infinite if some are."""
    scales = form.scales(parts.scales)
    values = form.values(np.arange(form.num_codes, dtype=np.uint8))
    largest = largest_of(scales) * float(np.abs(values).max())
    if parts.levels is not None:
        # At least 1: kernels multiply by levels last, and 0 times infinity is no number.
        largest *= float(np.abs(form.levels(parts.levels)).max(initial=1))
    if parts.minima is not None:
        least = largest_of(parts.minima.astype(np.float32))
        if parts.least_levels is not None:
            least *= float(parts.least_levels.max(initial=0))
        largest += least
    return largest
