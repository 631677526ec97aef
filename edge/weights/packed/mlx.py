"""Matrices in MLX's layout: weight = code · scale + bias.

weight uint32 [outputs, inputs · bits / 32]    the first input in the lowest bits
scales, biases float [outputs, groups]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.models.config import Config
from edge.weights.packed.matrix import (
    CODE_BITS,
    FLOATS,
    INTEGERS,
    CodedMatrix,
    Grid,
    PackedMatrix,
    Tensors,
)


def find_mlx(config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by name. Raises CheckpointError for unsupported or contradictory settings."""
    found: dict[str, PackedMatrix] = {}
    for layer in tensors.names(".scales"):
        codes = f"{layer}.weight"
        if not tensors.has(codes):
            raise tensors.error(f"{layer}.scales", f"has no {codes} beside it")
        rows, words = tensors.size(codes, INTEGERS)
        bits, group_size = _numbers(config, layer)
        columns, group = words * (32 // bits), tensors.check_group(group_size, codes, bits)
        grid = (rows, -(-columns // group))
        scales = tensors.expect(f"{layer}.scales", FLOATS, grid, codes)
        biases = tensors.expect(f"{layer}.biases", FLOATS, grid, codes)
        found[codes] = MlxMatrix(
            store=tensors.store,
            shape=(rows, columns),
            tensors=(codes, scales, biases),
            bits=bits,
            group=group,
            offsets=True,
        )
    return found


class MlxMatrix(CodedMatrix):
    """A matrix in MLX's layout."""

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        words = self.words_of(columns)
        return self.store.read(self.tensors[0], rows=rows, columns=words).view(np.uint8)

    def grid(self, rows: range, groups: range) -> Grid:
        scales, biases = (
            self.store.read(name, rows=rows, columns=groups).astype(np.float32)
            for name in self.tensors[1:]
        )
        return Grid(scales=scales, zeros=0.0, biases=biases)


def _numbers(config: Config, layer: str) -> tuple[int, int]:
    """Bits and columns of a group: of the layer if it has its own settings, else of all."""
    own: Any = config.values.get(layer)
    values = {**config.values, **own} if isinstance(own, dict) else config.values
    config = Config(values, source=config.source)
    bits = config.integer("bits", 4)
    mode = config.values.get("mode") or "affine"
    if bits not in CODE_BITS or mode != "affine":
        raise config.error(
            f"{layer} has codes of {bits} bits, mode {mode!r:.80}: 2, 4 and 8 bits, affine, are "
            "read; use another folder"
        )
    return bits, config.integer("group_size", 64)
