"""The layout of ONNX Runtime's `com.microsoft::MatMulNBits`, symmetric, and its arithmetic.

    y[m, n] = sum over k of x[m, k] * ((code[n, k] - zero_code) * scale[n, b] + offset[n, b])

where b is k // block_size, and offsets are 0 in most formats. Where columns are stored in another
order, k runs over them as they are stored, and x[m, k] is the input of the k-th. zero_code is the
block's zero point; without those it is half of all codes (2, 8 or 128), as the operator assumes. It
knows no offsets: their part is a product with the sums of each block of x. Knows numpy arrays;
knows nothing of files, graphs or how a model is split.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.rounding import RoundingTile

Accuracy = Literal["fast", "high"]
"""The closeness of a product to its weights; the stored bytes are the same for both."""

SUPPORTED_BITS = (2, 4, 8)
SUPPORTED_BLOCK_SIZES = (16, 32, 64, 128, 256)
LEAST_BLOCK = {2: 32, 4: 16, 8: 16}
"""By bits. Blocks of 16 with 2 bits leave the operator's integer path: one row times 2048 x 5632 in
one thread takes 74 ms, and with blocks of 32 0.4."""

# Blocks times block size: three float32 arrays of this many elements stay in a 1 MiB L2 cache.
_TILE_ELEMENTS = 65536
# numpy sums a narrow array in another order than a wide one; never being narrow keeps the scales
# of a row bitwise the same with any other rows.
_MIN_TILE_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """A weight [rows, columns] (rows are outputs) in blocks along its columns.

    codes: uint8 [rows, num_blocks, block_size * bits / 8]; the first column of a byte in its lowest
    bits. scales: float32 [rows, num_blocks], of either sign. zero_points: None, or uint8 as many.
    offsets: None, or as scales. Columns past the end hold the zero code. order: None, or int32
    [columns], the column that is stored at each place. Raises ValueError where the shapes
    contradict each other.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None = None
    offsets: NDArray[np.float32] | None = None
    order: NDArray[np.int32] | None = None
    bits: int
    block_size: int
    columns: int

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)
        codes, scales = packed_shapes((len(self.codes), self.columns), self.bits, self.block_size)
        if self.codes.shape != codes or self.codes.dtype != np.uint8:
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)}; {self.columns} columns of "
                f"{self.bits} bits in blocks of {self.block_size} need uint8 {list(codes)}"
            )
        for name, found, dtype in (
            ("scales", self.scales, np.float32),
            ("zero points", self.zero_points, np.uint8),
            ("offsets", self.offsets, np.float32),
        ):
            if found is not None and (found.shape != scales or found.dtype != dtype):
                raise ValueError(
                    f"{name} are {found.dtype} {list(found.shape)}, not {np.dtype(dtype)} "
                    f"{list(scales)}"
                )
        if self.order is not None and self.order.shape != (self.columns,):
            raise ValueError(f"an order {list(self.order.shape)} of {self.columns} columns")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        return len(self.codes), self.columns

    @property
    def zero_code(self) -> int:
        """The code whose value is 0 without zero points."""
        return 1 << (self.bits - 1)

    def zeros(self, blocks: slice) -> NDArray[np.uint8]:
        """The code whose value is 0 in these blocks [rows, blocks]."""
        if self.zero_points is None:
            return np.full_like(self.scales[:, blocks], self.zero_code, np.uint8)
        return self.zero_points[:, blocks]


def check_format(bits: int, block_size: int) -> None:
    """ValueError unless the operator has this format."""
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"{bits} bits per weight are not supported; choose from {SUPPORTED_BITS}")
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ValueError(
            f"blocks of {block_size} weights are not supported; choose from {SUPPORTED_BLOCK_SIZES}"
        )
    if block_size < LEAST_BLOCK[bits]:
        raise ValueError(
            f"blocks of {block_size} weights of {bits} bits are not supported; take "
            f"{LEAST_BLOCK[bits]} or more"
        )


def packed_shapes(
    shape: tuple[int, int], bits: int, block_size: int
) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Shapes of the uint8 codes and of the float32 scales of a weight [rows, columns]."""
    rows, columns = shape
    num_blocks = -(-columns // block_size)
    return (rows, num_blocks, block_size * bits // 8), (rows, num_blocks)


def quantize(
    weight: NDArray[np.generic],
    *,
    bits: int,
    block_size: int,
    zero_points: bool = False,
    num_threads: int = 2,
) -> QuantizedMatrix:
    """Rounds a float weight [rows, columns] to the nearest codes, blocks along the columns.

    Per block: the element of largest magnitude, with its sign, goes near the most negative code,
    which uses all 2^bits codes; 2 and 4 bits try several such places. For the codes c of each, the
    scale with the least squared error is sum(w c) / sum(c c), and the place with the least error
    stays.
    With zero points: the block's range, and three narrower ones, go onto the codes; from each, the
    scale is fitted and the codes rounded again. The one with the least error stays.
    Deterministic: a row's result depends on that row alone. Any float dtype; needs no scratch
    memory beyond 1 MiB per thread. Raises ValueError for other dtypes and for NaN or infinity.
    """
    result = room_for(weight, bits=bits, block_size=block_size, zero_points=zero_points)
    rows, num_blocks = result.scales.shape
    tile_rows = max(1, _TILE_ELEMENTS // (num_blocks * block_size))
    starts = range(0, rows, tile_rows)
    num_threads = max(1, min(num_threads, len(starts)))
    if num_threads == 1:
        _quantize_tiles(weight, result, starts, tile_rows)
        return result
    with ThreadPoolExecutor(num_threads) as pool:  # numpy lets go of the interpreter lock
        parts = [starts[first::num_threads] for first in range(num_threads)]
        for done in [pool.submit(_quantize_tiles, weight, result, p, tile_rows) for p in parts]:
            done.result()
    return result


def room_for(
    weight: NDArray[np.generic], *, bits: int, block_size: int, zero_points: bool
) -> QuantizedMatrix:
    """A matrix of this weight's shape, with nothing in it yet. Raises as `quantize` does."""
    check_format(bits, block_size)
    if weight.ndim != 2 or not weight.shape[1]:
        raise ValueError(f"a weight has rows and columns, not the shape {list(weight.shape)}")
    if not _is_float(weight.dtype):
        raise ValueError(f"only floating point weights are quantised, not {weight.dtype}")
    rows, columns = weight.shape
    codes, scales = packed_shapes((rows, columns), bits, block_size)
    return QuantizedMatrix(
        codes=np.empty(codes, np.uint8),
        scales=np.empty(scales, np.float32),
        zero_points=np.empty(scales, np.uint8) if zero_points else None,
        bits=bits,
        block_size=block_size,
        columns=columns,
    )


def dequantize(matrix: QuantizedMatrix) -> NDArray[np.float32]:
    """The float32 weight [rows, columns] that the codes stand for."""
    values = unpack(matrix.codes, matrix.bits).astype(np.float32)
    values -= matrix.zeros(slice(None))[:, :, None]
    values *= matrix.scales[:, :, None]
    if matrix.offsets is not None:
        values += matrix.offsets[:, :, None]
    stored = values.reshape(len(values), -1)[:, : matrix.columns]
    if matrix.order is None:
        return stored.copy()
    found = np.empty_like(stored)
    found[:, matrix.order] = stored
    return found


def matmul(x: NDArray[np.generic], matrix: QuantizedMatrix) -> NDArray[np.float32]:
    """x [..., columns] times the transposed weight, in float32: [..., rows]."""
    product: NDArray[np.float32] = x.astype(np.float32) @ dequantize(matrix).T
    return product


def slice_columns(matrix: QuantizedMatrix, columns: range) -> tuple[QuantizedMatrix, int]:
    """The inputs in `columns`, and the zeros the caller pads its activation with on the left.

    A block cannot be cut without changing its scale, so the slice begins at the block border at or
    before columns.start and the foreign codes, left and right, become the zero code. Every weight
    keeps its value in any split, so partial products sum to the whole. Offsets of foreign columns
    do not count: the activation is zero there. ValueError where columns are in another order.
    """
    if matrix.order is not None:
        raise ValueError("columns that are in another order are not cut")
    check_range(columns, matrix.columns, "columns")
    first = columns.start // matrix.block_size
    last = -(-columns.stop // matrix.block_size)
    left_padding = columns.start - first * matrix.block_size
    codes = matrix.codes[:, first:last].copy()
    kept = columns.stop - first * matrix.block_size
    for block in {0, last - first - 1}:  # only the two ends hold foreign codes
        unpacked = unpack(codes[:, block], matrix.bits)
        position = np.arange(matrix.block_size) + block * matrix.block_size
        foreign = (position < left_padding) | (position >= kept)
        unpacked[:, foreign] = matrix.zeros(slice(first + block, first + block + 1))
        codes[:, block] = pack(unpacked, matrix.bits)
    part = QuantizedMatrix(
        codes=codes,
        scales=matrix.scales[:, first:last].copy(),
        zero_points=None if matrix.zero_points is None else matrix.zeros(slice(first, last)).copy(),
        offsets=None if matrix.offsets is None else matrix.offsets[:, first:last].copy(),
        bits=matrix.bits,
        block_size=matrix.block_size,
        columns=kept,
    )
    return part, left_padding


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of one format and as many columns, in one order, under each other."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def joined(arrays: Sequence[NDArray[Any] | None]) -> Any:
        """None where a format has no such array."""
        present = [each for each in arrays if each is not None]
        return np.concatenate(present) if present else None

    return replace(
        first,
        codes=joined([each.codes for each in parts]),
        scales=joined([each.scales for each in parts]),
        zero_points=joined([each.zero_points for each in parts]),
        offsets=joined([each.offsets for each in parts]),
    )


def check_range(part: range, size: int, what: str) -> None:
    """ValueError unless `part` is a range of step 1 within `size` rows or columns, and not
    empty."""
    if part.step != 1 or not 0 <= part.start < part.stop <= size:
        raise ValueError(f"{part} is not a run of one or more of the {size} {what}")


def _is_float(dtype: np.dtype[np.generic]) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def unpack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """One code per byte: [..., block_size]; a copy."""
    if bits == 8:
        return codes.copy()
    per_byte, most = 8 // bits, np.uint8((1 << bits) - 1)
    unpacked = np.empty((*codes.shape[:-1], codes.shape[-1] * per_byte), np.uint8)
    for place in range(per_byte):
        shifted = unpacked[..., place::per_byte]
        np.right_shift(codes, np.uint8(bits * place), out=shifted)
        np.bitwise_and(shifted, most, out=shifted)
    return unpacked


def pack(unpacked: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes one per byte [..., block_size] as `QuantizedMatrix` holds them."""
    if bits == 8:
        return unpacked
    per_byte = 8 // bits
    packed = unpacked[..., 0::per_byte].copy()
    for place in range(1, per_byte):
        packed |= unpacked[..., place::per_byte] << np.uint8(bits * place)
    return packed


def _quantize_tiles(
    weight: NDArray[np.generic], result: QuantizedMatrix, starts: Sequence[int], tile_rows: int
) -> None:
    """Quantises `tile_rows` rows from each of `starts` into `result`."""
    num_blocks, block_size = result.scales.shape[1], result.block_size
    width = max(_MIN_TILE_BLOCKS, min(tile_rows, len(weight)) * num_blocks)
    tile = RoundingTile(
        result.bits, block_size, width, weight.dtype, has_zeros=result.zero_points is not None
    )
    padding = num_blocks * block_size - result.columns
    for start in starts:
        rows = weight[start : start + tile_rows]
        if padding:
            padded = np.zeros((len(rows), num_blocks * block_size), weight.dtype)
            padded[:, : result.columns] = rows
            rows = padded
        stop = start + len(rows)
        tile.quantize(
            np.ascontiguousarray(rows).reshape(-1, block_size),
            result.codes[start:stop].reshape(-1, result.codes.shape[2]),
            result.scales[start:stop].reshape(-1),
            None if result.zero_points is None else result.zero_points[start:stop].reshape(-1),
        )


def pack_zero_points(zero_points: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """uint8 [rows, blocks] as the operator takes them: in a byte two of 4 bits, or four of 2."""
    missing = -zero_points.shape[1] % (8 // bits)
    if missing:
        zero_points = np.pad(zero_points, [(0, 0), (0, missing)])
    return pack(zero_points, bits)


def unpack_zero_points(packed: NDArray[np.uint8], bits: int, num_blocks: int) -> NDArray[np.uint8]:
    """What `pack_zero_points` was given."""
    return np.ascontiguousarray(unpack(packed, bits)[:, :num_blocks])
