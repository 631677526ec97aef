"""Matrices of integer codes in the layout of the library compressed-tensors.

Format pack-quantized:

    weight_packed int32 [outputs, inputs · bits / 32]   the first input in the lowest bits
    weight_scale  float [outputs, groups]
    weight_zero_point   int8 [outputs, groups], or int32 [outputs · bits / 32, groups], or absent
    weight_shape  int64 [2]

Codes and packed zeros are raised by half their range; int8 zeros are not. Formats int-quantized and
naive-quantized: weight int8 [outputs, inputs] in place of weight_packed. Others are in fp8.py and
nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import QuantizedMatrix, pack, unpack
from edge.models.config import Config
from edge.weights.block_matrices import Blocks
from edge.weights.packed.fp8 import block_of, find_fp8
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
from edge.weights.packed.nvfp4 import nvfp4_matrix

_PACKED = "pack-quantized"
_PLAIN = ("int-quantized", "naive-quantized")
_FLOATS = "float-quantized"
_FLOATS_OF_4_BITS = "nvfp4-pack-quantized"
_MIXED = "mixed-precision"
_FORMATS = (_PACKED, *_PLAIN, _FLOATS, _FLOATS_OF_4_BITS, _MIXED)
_MOST_GROUPS = 256
"""Most groups of a configuration; files have one or two."""


def find_compressed(config: Config, tensors: Tensors) -> dict[str, PackedMatrix]:
    """Matrices by name. Raises CheckpointError for unsupported or contradictory settings.

    A matrix's scheme is found by its tensors; patterns of names are not evaluated.
    """
    layout = config.values.get("format")
    if not isinstance(layout, str) or layout not in _FORMATS:
        raise config.error(
            f"format {layout!r:.80} is not read, {', '.join(_FORMATS)} are; use another folder"
        )
    if config.values.get("sparsity_config"):
        sparse = config.mapping("sparsity_config").get("format", "dense")
        if sparse != "dense":
            raise config.error(f"sparsity {sparse!r:.80} is not read; use another folder")
    if config.values.get("transform_config"):
        raise config.error("transform_config is not computed; use another folder")
    schemes = _schemes(config)
    found: dict[str, PackedMatrix] = {}
    for layer in tensors.names(".weight_packed"):
        codes = f"{layer}.weight_packed"
        scales, factor = f"{layer}.weight_scale", f"{layer}.weight_global_scale"
        found[tensors.alone(f"{layer}.weight", codes)] = (
            nvfp4_matrix(tensors, codes, scales, factor, divides=True)
            if tensors.store.dtype(codes) == np.uint8
            else _packed(schemes, tensors, layer)
        )
    for layer in tensors.names(".weight_scale"):
        weight = f"{layer}.weight"
        if tensors.has(weight) and tensors.store.dtype(weight).name == "int8":
            found[weight] = _plain(schemes, tensors, layer)
    return found | find_fp8(config, tensors, blocks=_float_blocks(config))


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressedMatrix(CodedMatrix):
    """Tensors: codes, scales, zeros and groups of the columns, if there are any.

    order: the tensor with the group of each column, of a shuffled matrix.
    """

    zeros: str | None
    order: str | None = None

    def codes(self, rows: range, columns: range) -> NDArray[np.uint8]:
        name = self.tensors[0]
        if self.store.dtype(name).name == "int8":
            stop = min(-(-columns.stop // 4) * 4, self.shape[1])
            raw = self.store.read(name, rows=rows, columns=range(columns.start, stop))
            return raw.view(np.uint8) ^ np.uint8(0x80)
        return self.store.read(name, rows=rows, columns=self.words_of(columns)).view(np.uint8)

    def grid(self, rows: range, groups: range) -> Grid:
        middle = float(1 << (self.bits - 1))
        scales = self.store.read(self.tensors[1], rows=rows, columns=groups).astype(np.float32)
        if self.zeros is None:
            return Grid(scales=scales, zeros=middle)
        if self.store.dtype(self.zeros).name == "int8":
            raw = self.store.read(self.zeros, rows=rows, columns=groups)
            return Grid(scales=scales, zeros=raw.astype(np.float32) + np.float32(middle))
        words = self.words_of(rows)
        packed = self.store.read(self.zeros, rows=words, columns=groups)
        lines = unpack(np.ascontiguousarray(packed.T).view(np.uint8), self.bits)
        first = rows.start - words.start * (32 // self.bits)
        zeros = lines[:, first : first + len(rows)].T.astype(np.float32)
        return Grid(scales=scales, zeros=np.ascontiguousarray(zeros))

    def group_of(self, columns: range) -> NDArray[np.int32]:
        if self.order is None:
            return CodedMatrix.group_of(self, columns)
        groups = -(-self.shape[1] // self.group)
        return group_numbers(self.store, self.order, groups, columns)


def compressed_tensors(
    layer: str, kind: Blocks, shape: tuple[int, int]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{tensor: (type, shape)} in a safetensors file for a matrix of this kind, pack-quantized."""
    rows, columns = shape
    groups = -(-columns // kind.block_size)
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{layer}.weight_packed": ("I32", (rows, _words(columns, kind.bits))),
        f"{layer}.weight_scale": ("F32", (rows, groups)),
        f"{layer}.weight_shape": ("I64", (2,)),
    }
    if kind.zero_points:
        found[f"{layer}.weight_zero_point"] = ("I32", (_words(rows, kind.bits), groups))
    return found


def compressed_arrays(layer: str, matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
    """The values of the tensors of `compressed_tensors`."""
    rows, columns = matrix.shape
    codes = matrix.codes.reshape(rows, -1)[:, : 4 * _words(columns, matrix.bits)]
    found: dict[str, NDArray[Any]] = {
        f"{layer}.weight_packed": np.ascontiguousarray(codes).view(np.int32),
        f"{layer}.weight_scale": matrix.scales,
        f"{layer}.weight_shape": np.array(matrix.shape, np.int64),
    }
    if matrix.zero_points is not None:  # rows share words
        missing = _words(rows, matrix.bits) * (32 // matrix.bits) - rows
        lines = np.ascontiguousarray(np.pad(matrix.zero_points, [(0, missing), (0, 0)]).T)
        words = pack(lines, matrix.bits).view(np.int32)
        found[f"{layer}.weight_zero_point"] = np.ascontiguousarray(words.T)
    return found


def _words(codes: int, bits: int) -> int:
    """Words of 32 bits that hold `codes` codes."""
    return -(-codes * bits // 32)


def _packed(schemes: list[_Scheme], tensors: Tensors, layer: str) -> CompressedMatrix:
    codes, meant = f"{layer}.weight_packed", f"{layer}.weight_shape"
    rows, words = tensors.size(codes, INTEGERS)
    tensors.expect(meant, ("int64", "int32"), (2,), codes)
    columns = int(tensors.store.read(meant)[1])
    if int(tensors.store.read(meant)[0]) != rows:
        raise tensors.error(meant, f"names another number of rows than the {rows} of {codes}")
    fitting = [each for each in schemes if _words(columns, each.bits) == words]
    if columns < 1 or not fitting:
        raise tensors.error(
            codes, f"has {words} words for a row of {columns} codes, as no bits of a group make it"
        )
    return _with_scales(fitting, tensors, layer, (rows, columns), codes)


def _plain(schemes: list[_Scheme], tensors: Tensors, layer: str) -> CompressedMatrix:
    codes = f"{layer}.weight"
    fitting = [each for each in schemes if each.bits == 8]
    if not fitting:
        raise tensors.error(codes, "is int8, and no group of the configuration has 8 bits")
    return _with_scales(fitting, tensors, layer, tensors.size(codes, ("int8",)), codes)


def _with_scales(
    schemes: list[_Scheme], tensors: Tensors, layer: str, shape: tuple[int, int], codes: str
) -> CompressedMatrix:
    scales, zeros, order = (f"{layer}.weight_{each}" for each in ("scale", "zero_point", "g_idx"))
    if not tensors.has(scales):
        raise tensors.error(codes, f"has no {scales} beside it")
    rows, columns = shape
    found = tensors.store.shape(scales)
    widths = {-(-columns // (each.group or columns)): each for each in schemes}
    if len(found) != 2 or found[0] != rows or found[1] not in widths:
        raise tensors.error(
            scales,
            f"has shape {list(found)}; {codes} and the configuration make it "
            f"{' or '.join(str([rows, each]) for each in widths)}",
        )
    scheme = widths[found[1]]
    group = columns
    if scheme.group is not None:
        group = tensors.check_group(scheme.group, codes, scheme.bits)
    tensors.expect(scales, FLOATS, found, codes)
    has_zeros = tensors.has(zeros)
    if has_zeros:
        packed = tensors.store.dtype(zeros).name in INTEGERS
        lines = _words(rows, scheme.bits) if packed else rows
        tensors.expect(zeros, (*INTEGERS, "int8"), (lines, found[1]), codes)
    is_shuffled = False
    if tensors.has(order):
        tensors.expect(order, INTEGERS, (columns,), codes)
        is_shuffled = tensors.is_shuffled(order, group, found[1])
    return CompressedMatrix(
        store=tensors.store,
        shape=shape,
        tensors=(
            codes,
            scales,
            *(each for each in (zeros, order, f"{layer}.weight_shape") if tensors.has(each)),
        ),
        bits=scheme.bits,
        group=group,
        zero_points=has_zeros,
        is_shuffled=is_shuffled,
        zeros=zeros if has_zeros else None,
        order=order if is_shuffled else None,
    )


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A configuration group's scheme of weights; group None: one scale for a row."""

    bits: int
    group: int | None


def _weights(config: Config) -> list[Config]:
    """The weights' settings of the configuration's groups."""
    groups: Mapping[str, Any] = config.mapping("config_groups")
    if not 0 < len(groups) <= _MOST_GROUPS:
        raise config.error(f"config_groups must be 1 to {_MOST_GROUPS} groups")
    found = []
    for each in groups.values():
        weights = each.get("weights") if isinstance(each, Mapping) else None
        if weights is not None and not isinstance(weights, Mapping):
            raise config.error("a group of config_groups has no settings of weights")
        if weights is not None:
            found.append(Config(weights, source=f"{config.source}: weights of config_groups"))
    return found


def _schemes(config: Config) -> list[_Scheme]:
    """The schemes of groups with integer codes."""
    found: list[_Scheme] = []
    for weights in _weights(config):
        if weights.values.get("type", "int") != "int":
            continue
        bits, strategy = weights.integer("num_bits", 8), weights.values.get("strategy")
        if bits not in CODE_BITS:
            raise weights.error(
                f"codes of {bits} bits are not read, 2, 4 and 8 are; use another one"
            )
        group = weights.integer("group_size", -1)
        if strategy in (None, "group", "channel"):
            grouped = strategy == "group" or (strategy is None and group != -1)
            found.append(_Scheme(bits, group if grouped else None))
        else:
            raise weights.error(
                f"strategy {strategy!r:.80} of integer weights is not read, group and channel are; "
                "use another folder"
            )
        if found[-1].group is not None and found[-1].group < 1:
            raise weights.error("group_size must be a positive number")
    return found


def _float_blocks(config: Config) -> tuple[int, int] | None:
    """Rows and columns of a block that shares a scale, if float weights have blocks."""
    for weights in _weights(config):
        size = weights.values.get("block_structure")
        if weights.values.get("type") == "float" and size is not None:
            return block_of(weights, "block_structure")
    return None
