"""Types of GGUF tensors: blocks of codes with scales, and their dequantization.

The table `BLOCK_TYPES` has the facts of each type. Its formulas are pure: bytes in, codes and their
scales out. The layouts are those of ggml (`block_q4_0` and so on in its ggml-common.h). A
"super-block" of 256 weights has scales for runs of 16 or 32 of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edge.offload.files.gguf_grids import GRIDS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codes:
    """Weights as whole numbers in runs that share a scale.

    values: int8 [..., runs, run]. scales: float32 [..., runs]. offsets: shaped as scales, or None;
    added to each weight of a run.
    """

    values: NDArray[np.int8]
    scales: Floats
    offsets: Floats | None = None

    def floats(self) -> Floats:
        """The weights [..., runs × run]."""
        weights = self.values.astype(np.float32) * self.scales[..., None]
        if self.offsets is not None:
            weights += self.offsets[..., None]
        return _flat(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeType:
    """The codes of a type.

    codes: bytes [..., blocks, block_bytes] to Codes [..., blocks, runs, run]. bits: size of signed
    numbers that hold the values plus `shift`. With offsets, the shift centres values on 0, because
    products round their inputs, and lose less with smaller codes. run: weights with one scale.
    """

    codes: Callable[[Bytes], Codes]
    bits: int
    run: int
    has_offsets: bool = False
    shift: int = 0
    scale_at: int = 0
    """The byte of a block's float16 scale; its minimum, if it has one, follows."""
    levels: Callable[[Bytes], tuple[NDArray[Any], Bytes | None]] | None = None
    """Bytes [..., block_bytes] to the levels of runs by which the scale is multiplied, and those of
    the minimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One type of tensor.

    name: ggml's. block_size: weights of a block. block_bytes: bytes of a block. coded: None for
    plain floats and unsupported types. dtype: of plain floats.
    """

    name: str
    block_size: int
    block_bytes: int
    coded: CodeType | None = None
    dtype: np.dtype[Any] | None = None

    @property
    def is_read(self) -> bool:
        return self.coded is not None or self.dtype is not None

    def codes(self, blocks: Bytes) -> Codes:
        """Bytes [rows, blocks, block_bytes] as codes [rows, runs, run]. Raises ValueError for
        unsupported types.

        Scales may be NaN for bytes that no quantiser wrote.
        """
        if self.coded is None:
            raise ValueError(f"blocks of type {self.name} are not read")
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.coded.codes(blocks)
        rows, run = len(blocks), self.coded.run
        offsets = found.offsets
        return Codes(
            values=found.values.reshape(rows, -1, run),
            scales=found.scales.reshape(rows, -1),
            offsets=None if offsets is None else offsets.reshape(rows, -1),
        )

    def dequantize(self, blocks: Bytes) -> Floats:
        """Bytes [..., blocks, block_bytes] as weights [..., blocks × block_size].

        Every value is the float32 of ggml's reference. Scales that are NaN give weights that are
        NaN. Raises ValueError for unsupported types.
        """
        if self.dtype is not None:
            values: Floats = np.ascontiguousarray(blocks).view(self.dtype).astype(np.float32)
            return values.reshape(*blocks.shape[:-2], -1)
        if self.coded is None:
            raise ValueError(f"blocks of type {self.name} are not read")
        with np.errstate(over="ignore", invalid="ignore"):
            weights = self.coded.codes(blocks).floats()
        return weights.reshape(*blocks.shape[:-2], -1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at this byte of each block, as [..., 1]."""
    two = np.ascontiguousarray(blocks[..., at : at + 2])
    return two.view(np.float16).astype(np.float32)


def _halves_of_bytes(codes: Bytes) -> Bytes:
    """[..., n] to [..., 2n]: first the low four bits of all bytes, then the high four."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _fields(codes: Bytes, runs: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """[..., n] to [..., runs × shifts, n / runs]: the bits at each shift of each run of bytes."""
    cut = codes.reshape(*codes.shape[:-1], runs, 1, -1)
    by = np.array(shifts, np.uint8).reshape(-1, 1)
    shape = (*codes.shape[:-1], runs * len(shifts), codes.shape[-1] // runs)
    shifted: Bytes = np.right_shift(cut, by).reshape(shape)
    return shifted & np.uint8(mask)


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """Join the last two axes."""
    return values.reshape(*values.shape[:-2], -1)


def _fifth_bits(four_bytes: Bytes) -> Bytes:
    """[..., 4] to [..., 32]: bit i, in the place of a code's fifth bit."""
    bits: Bytes = np.unpackbits(four_bytes, axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _one_run(values: NDArray[Any], scales: Floats, offsets: Floats | None = None) -> Codes:
    """Codes of blocks that are one run: values [..., 32], scales [..., 1]."""
    return Codes(values=values.astype(np.int8)[..., None, :], scales=scales, offsets=offsets)


def _q4_0(blocks: Bytes) -> Codes:
    return _one_run(_halves_of_bytes(blocks[..., 2:18]).astype(np.int8) - 8, _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Codes:
    return _one_run(_halves_of_bytes(blocks[..., 4:20]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Codes:
    codes = _halves_of_bytes(blocks[..., 6:22]) | _fifth_bits(blocks[..., 2:6])
    return _one_run(codes.astype(np.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Codes:
    codes = _halves_of_bytes(blocks[..., 8:24]) | _fifth_bits(blocks[..., 4:8])
    return _one_run(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Codes:
    return _one_run(np.ascontiguousarray(blocks[..., 2:34]).view(np.int8), _half(blocks, 0))


_TWO_BITS = (0, 2, 4, 6)


def _runs_of_16(values: NDArray[Any]) -> NDArray[np.int8]:
    """[..., n, m] to [..., 16, 16]."""
    return values.astype(np.int8).reshape(*values.shape[:-2], 16, 16)


def _q2_k_levels(blocks: Bytes) -> tuple[Bytes, Bytes]:
    return blocks[..., 0:16] & np.uint8(15), blocks[..., 0:16] >> np.uint8(4)


def _q2_k(blocks: Bytes) -> Codes:
    steps, least = (each.astype(np.float32) for each in _q2_k_levels(blocks))
    scales, minima = _half(blocks, 80) * steps, _half(blocks, 82) * least
    values = _runs_of_16(_fields(blocks[..., 16:80], 2, _TWO_BITS, 3))
    return Codes(values=values, scales=scales, offsets=-minima)


def _q3_k_levels(blocks: Bytes) -> tuple[NDArray[np.int8], None]:
    low = _halves_of_bytes(blocks[..., 96:104])
    high = _flat(_fields(blocks[..., 104:108], 1, _TWO_BITS, 3))
    return (low | high << 4).astype(np.int8) - np.int8(32), None


def _q3_k(blocks: Bytes) -> Codes:
    mask, codes = blocks[..., 0:32], blocks[..., 32:96]
    steps = _q3_k_levels(blocks)[0].astype(np.float32)
    is_absent = _fields(mask, 1, tuple(range(8)), 1) ^ 1  # a set bit subtracts nothing
    values = _fields(codes, 2, _TWO_BITS, 3).astype(np.int8) - (is_absent << 2).astype(np.int8)
    return Codes(values=_runs_of_16(values), scales=_half(blocks, 108) * steps)


def _six_bits(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Q4_K's and Q5_K's 8 scales and 8 minima of 6 bits; the last four of each are in two
    pieces."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, third & 15 | (first >> 2) & 48], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 2) & 48], axis=-1)
    return scales, minima


def _with_minima(blocks: Bytes, values: Bytes) -> Codes:
    """Q4_K's and Q5_K's values [..., 8, 32], their scales and minima."""
    steps, least = (each.astype(np.float32) for each in _six_bits(blocks))
    scales, minima = _half(blocks, 0) * steps, _half(blocks, 2) * least
    return Codes(values=values.astype(np.int8), scales=scales, offsets=-minima)


def _q4_k(blocks: Bytes) -> Codes:
    return _with_minima(blocks, _fields(blocks[..., 16:144], 4, (0, 4), 15))


def _q5_k(blocks: Bytes) -> Codes:
    fifth = _fields(blocks[..., 16:48], 1, tuple(range(8)), 1)
    return _with_minima(blocks, _fields(blocks[..., 48:176], 4, (0, 4), 15) | fifth << np.uint8(4))


def _q6_k_levels(blocks: Bytes) -> tuple[NDArray[np.int8], None]:
    return np.ascontiguousarray(blocks[..., 192:208]).view(np.int8), None


def _q6_k(blocks: Bytes) -> Codes:
    low = _fields(blocks[..., 0:128], 2, (0, 4), 15)
    high = _fields(blocks[..., 128:192], 2, _TWO_BITS, 3)
    steps = _q6_k_levels(blocks)[0].astype(np.float32)
    values = (low.reshape(high.shape) | high << 4).astype(np.int8) - 32
    return Codes(values=_runs_of_16(values), scales=_half(blocks, 208) * steps)


IQ4_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
"""Weights, divided by the scale, of the codes of IQ4_NL and IQ4_XS."""


def _iq4_nl(blocks: Bytes) -> Codes:
    return _one_run(IQ4_VALUES[_halves_of_bytes(blocks[..., 2:18])], _half(blocks, 0))


def _iq4_xs_levels(blocks: Bytes) -> tuple[NDArray[np.int8], None]:
    high_bits = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")
    high = (high_bits >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    low = _flat(np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1))
    return (low | high << 4).astype(np.int8) - np.int8(32), None


def _iq4_xs(blocks: Bytes) -> Codes:
    steps = _iq4_xs_levels(blocks)[0].astype(np.float32)
    codes = blocks[..., 8:136].reshape(*blocks.shape[:-1], 8, 16)
    return Codes(values=IQ4_VALUES[_halves_of_bytes(codes)], scales=_half(blocks, 0) * steps)


MXFP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""Twice the weights of MXFP4 codes, which are whole numbers."""


_MXFP4_SCALES = np.ldexp(1.0, np.arange(256) - 128).astype(np.float32)
"""Half of 2^(e - 127), because the values are doubled."""


def _mxfp4(blocks: Bytes) -> Codes:
    return _one_run(
        MXFP4_VALUES[_halves_of_bytes(blocks[..., 1:17])], _MXFP4_SCALES[blocks[..., 0:1]]
    )


_FLOATS_OF_8_BITS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_NVFP4_SCALES = np.abs(_FLOATS_OF_8_BITS) / 2
"""Without signs, and half, because the values are doubled."""
_NVFP4_SCALES[0x7F], _NVFP4_SCALES[0xFF] = 0, 240


def _nvfp4_levels(blocks: Bytes) -> tuple[Bytes, None]:
    found = blocks[..., 0:4]
    return np.where(found == 0x7F, 0, found & 0x7F).astype(np.uint8), None


def _nvfp4(blocks: Bytes) -> Codes:
    codes = _halves_of_bytes(blocks[..., 4:36].reshape(*blocks.shape[:-1], 4, 8))
    return Codes(values=MXFP4_VALUES[codes], scales=_NVFP4_SCALES[blocks[..., 0:4]])


def _in_grid(name: str, nbytes: int, *, run: int = 32) -> BlockType:
    grid = GRIDS[name]

    def levels(blocks: Bytes) -> tuple[Bytes, None]:
        return grid.fields(blocks)[2], None

    def codes(blocks: Bytes) -> Codes:
        numbers, signs, steps = grid.fields(blocks)
        values = grid.values(numbers, signs).reshape(*blocks.shape[:-1], -1, run)
        scales = _half(blocks, 0) * np.float32(grid.share) * steps.astype(np.float32)
        return Codes(values=values, scales=scales)

    return _type(name, 256, nbytes, codes, run=run, levels=levels)


def _floats(name: str, number_type: Any) -> BlockType:
    dtype = np.dtype(number_type)
    return BlockType(name=name, block_size=1, block_bytes=dtype.itemsize, dtype=dtype)


def _type(
    name: str,
    size: int,
    nbytes: int,
    codes: Callable[[Bytes], Codes] | None = None,
    *,
    bits: int = 8,
    run: int = 32,
    **more: Any,
) -> BlockType:
    coded = None
    if codes is not None:
        coded = CodeType(codes=codes, bits=bits, run=run, **more)
    return BlockType(name=name, block_size=size, block_bytes=nbytes, coded=coded)


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: _floats("F32", np.float32),
    1: _floats("F16", np.float16),
    2: _type("Q4_0", 32, 18, _q4_0, bits=4),
    3: _type("Q4_1", 32, 20, _q4_1, bits=4, has_offsets=True, shift=-8),
    6: _type("Q5_0", 32, 22, _q5_0),
    7: _type("Q5_1", 32, 24, _q5_1, has_offsets=True, shift=-16),
    8: _type("Q8_0", 32, 34, _q8_0),
    9: _type("Q8_1", 32, 40),
    10: _type(
        "Q2_K",
        256,
        84,
        _q2_k,
        bits=4,
        run=16,
        has_offsets=True,
        shift=-2,
        scale_at=80,
        levels=_q2_k_levels,
    ),
    11: _type("Q3_K", 256, 110, _q3_k, bits=4, run=16, scale_at=108, levels=_q3_k_levels),
    12: _type("Q4_K", 256, 144, _q4_k, bits=4, has_offsets=True, shift=-8, levels=_six_bits),
    13: _type("Q5_K", 256, 176, _q5_k, has_offsets=True, shift=-16, levels=_six_bits),
    14: _type("Q6_K", 256, 210, _q6_k, run=16, scale_at=208, levels=_q6_k_levels),
    15: _type("Q8_K", 256, 292),
    16: _in_grid("IQ2_XXS", 66),
    17: _in_grid("IQ2_XS", 74, run=16),
    18: _in_grid("IQ3_XXS", 98),
    19: _type("IQ1_S", 256, 50),
    20: _type("IQ4_NL", 32, 18, _iq4_nl),
    21: _in_grid("IQ3_S", 110),
    22: _in_grid("IQ2_S", 82, run=16),
    23: _type("IQ4_XS", 256, 136, _iq4_xs, levels=_iq4_xs_levels),
    24: _type("I8", 1, 1),
    25: _type("I16", 1, 2),
    26: _type("I32", 1, 4),
    27: _type("I64", 1, 8),
    28: _type("F64", 1, 8),
    29: _type("IQ1_M", 256, 56),
    30: _floats("BF16", ml_dtypes.bfloat16),
    34: _type("TQ1_0", 256, 54),
    35: _type("TQ2_0", 256, 66),
    39: _type("MXFP4", 32, 17, _mxfp4),
    40: _type("NVFP4", 64, 36, _nvfp4, run=16, levels=_nvfp4_levels),
}
"""Types by ggml's number. Unsupported types have only sizes."""

READ_TYPES = tuple(each.name for each in BLOCK_TYPES.values() if each.is_read)
"""Names of the types whose weights are read."""
