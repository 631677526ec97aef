"""Matrices in AWQ's layout (version gemm): codes along the outputs, in words of 32 bits.

    qweight int32 [inputs, outputs / 8]
    qzeros  int32 [groups, outputs / 8]
    scales  float [groups, outputs]

From the lowest bits on, a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import unpack
from edge.models.config import Config
from edge.weights.packed.matrix import FLOATS, INTEGERS, CodedMatrix, Grid, PackedMatrix, Tensors

_WORD = 8
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Place of each output among the codes of its word."""


def find_awq(config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by name. Raises CheckpointError for unsupported or contradictory settings."""
    bits = config.integer("bits")
    if bits != 4:
        raise config.error(f"AWQ of {bits} bits is not read, 4 are; use another folder")
    version = config.values.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise config.error(
            f"AWQ of version {version!r:.80} is not read, gemm is; use another folder"
        )
    group_size = config.integer("group_size", 128)
    found: dict[str, PackedMatrix] = {}
    for layer in tensors.names(".qweight"):
        codes = f"{layer}.qweight"
        columns, words = tensors.size(codes, INTEGERS)
        rows = words * _WORD
        group = columns if group_size == -1 else tensors.check_group(group_size, codes, 4)
        groups = -(-columns // group)
        scales = tensors.expect(f"{layer}.scales", FLOATS, (groups, rows), codes)
        zeros = tensors.expect(f"{layer}.qzeros", INTEGERS, (groups, words), codes)
        found[tensors.alone(f"{layer}.weight", codes)] = AwqMatrix(
            store=tensors.store,
            shape=(rows, columns),
            tensors=(codes, scales, zeros),
            bits=bits,
            group=group,
            zero_points=True,
        )
    return found


class AwqMatrix(CodedMatrix):
    """A matrix in AWQ's layout."""

    inputs_first = True

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        padded = -(-columns.stop // _WORD) * _WORD
        inputs = range(columns.start, min(padded, self.shape[1]))
        single = self._in_order(self.tensors[0], inputs, rows)
        if len(single) % 2:
            single = np.concatenate([single, np.zeros_like(single[:1])])
        pairs = single[0::2] | single[1::2] << np.uint8(4)
        return np.ascontiguousarray(pairs.T)

    def grid(self, rows: range, groups: range) -> Grid:
        scales = self.store.read(self.tensors[1], rows=groups, columns=rows)
        zeros = self._in_order(self.tensors[2], groups, rows)
        return Grid(
            scales=np.ascontiguousarray(scales.T.astype(np.float32)),
            zeros=np.ascontiguousarray(zeros.T.astype(np.float32)),
        )

    def _in_order(self, name: str, lines: range, outputs: range) -> NDArray[np.uint8]:
        """Codes [lines, outputs] of a tensor, one per byte."""
        words = self.words_of(outputs)
        raw = self.store.read(name, rows=lines, columns=words).view(np.uint8)
        codes = unpack(raw, 4).reshape(len(lines), len(words), _WORD)[..., _PLACES]
        first = outputs.start - words.start * _WORD
        return codes.reshape(len(lines), -1)[:, first : first + len(outputs)]
