"""Matrices in GPTQ's layout: codes along the inputs, in words of 32 bits.

qweight int32 [inputs · bits / 32, outputs]    the first input in the lowest bits
qzeros  int32 [groups, outputs · bits / 32]    one less than the zero in `checkpoint_format` gptq
scales  float [groups, outputs]
g_idx   int32 [inputs]                         the group of each input; may be absent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import unpack
from edge.models.config import Config
from edge.weights.packed.matrix import (
    CODE_BITS,
    FLOATS,
    INTEGERS,
    CodedMatrix,
    Grid,
    PackedMatrix,
    Tensors,
    group_numbers,
)

_RULES = ("dynamic", "extra_config")
"""Settings of matrices with other bits or groups: of GPTQModel, and of AutoRound."""
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Added to stored zeros, by `checkpoint_format`. With 1, the largest zero is above all codes, so
blocks have offsets."""


def find_gptq(config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by name. Raises CheckpointError for unsupported or contradictory settings."""
    bits = config.integer("bits")
    if bits not in CODE_BITS:
        raise config.error(f"codes of {bits} bits are not read, 2, 4 and 8 are; use another folder")
    layout = config.values.get("checkpoint_format") or "gptq"
    if not isinstance(layout, str) or layout not in _FORMATS:
        raise config.error(
            f"checkpoint_format {layout!r:.80} is not read, gptq and gptq_v2 are; use another one"
        )
    usual, usual_group = bits, config.integer("group_size", -1)
    rules = [rule for name in _RULES for rule in config.mapping(name).values()]
    rules = [rule for rule in rules if isinstance(rule, Mapping)]
    sizes = [usual_group, *(rule.get("group_size") for rule in rules)]
    symmetric = config.flag("sym", False) and not any("sym" in rule for rule in rules)
    found: dict[str, PackedMatrix] = {}
    for layer in tensors.names(".qweight"):
        codes, bits, group_size = f"{layer}.qweight", usual, usual_group
        words, rows = tensors.size(codes, INTEGERS)
        if rules:
            bits, group_size = _by_shapes(tensors, layer, usual, sizes)
        word = 32 // bits
        columns = words * word
        group = columns if group_size == -1 else tensors.check_group(group_size, codes, bits)
        groups = -(-columns // group)
        scales = tensors.expect(f"{layer}.scales", FLOATS, (groups, rows), codes)
        zeros = tensors.expect(f"{layer}.qzeros", INTEGERS, (groups, -(-rows // word)), codes)
        order = f"{layer}.g_idx"
        present = tensors.has(order)
        if present:
            tensors.expect(order, INTEGERS, (columns,), codes)
        matrix = GptqMatrix(
            store=tensors.store,
            shape=(rows, columns),
            tensors=(codes, scales, zeros, *([order] if present else [])),
            bits=bits,
            group=group,
            zero_points=not symmetric and not _FORMATS[layout],
            offsets=not symmetric and bool(_FORMATS[layout]),
            is_shuffled=present and tensors.is_shuffled(order, group, groups),
            lacking=_FORMATS[layout],
        )
        found[tensors.alone(f"{layer}.weight", codes)] = matrix
    return found


def _by_shapes(tensors: Tensors, layer: str, bits: int, sizes: Sequence[Any]) -> tuple[int, int]:
    """Bits and group size of a matrix to which a rule may apply.

    They are found by the shapes of its tensors, so patterns of rules are not evaluated. sizes:
    group sizes of the settings, the usual one first.
    """
    words, rows = tensors.size(f"{layer}.qweight", INTEGERS)
    groups, zeros = tensors.size(f"{layer}.qzeros", INTEGERS)
    bits = next((each for each in CODE_BITS if -(-rows * each // 32) == zeros), bits)
    columns = words * 32 // bits
    for size in sizes:
        if type(size) is int and size > 0 and -(-columns // size) == groups:
            return bits, size
    return bits, -1 if groups == 1 else sizes[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class GptqMatrix(CodedMatrix):
    """A matrix in GPTQ's layout. lacking: added to stored zeros."""

    lacking: int

    inputs_first = True

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        raw = self.store.read(self.tensors[0], rows=self.words_of(columns), columns=rows)
        return np.ascontiguousarray(raw.T).view(np.uint8)

    def grid(self, rows: range, groups: range) -> Grid:
        words = self.words_of(rows)
        scales = self.store.read(self.tensors[1], rows=groups, columns=rows)
        raw = self.store.read(self.tensors[2], rows=groups, columns=words).view(np.uint8)
        first = rows.start - words.start * (32 // self.bits)
        zeros = unpack(raw, self.bits)[:, first : first + len(rows)].astype(np.float32)
        return Grid(
            scales=np.ascontiguousarray(scales.T.astype(np.float32)),
            zeros=np.ascontiguousarray(zeros.T + np.float32(self.lacking)),
        )

    def group_of(self, columns: range) -> NDArray[np.int32]:
        if not self.is_shuffled:
            return CodedMatrix.group_of(self, columns)
        groups = -(-self.shape[1] // self.group)
        return group_numbers(self.store, self.tensors[3], groups, columns)
