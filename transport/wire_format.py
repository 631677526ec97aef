"""Wire formats of float32 activations: float16, or int8 in blocks with a common scale.

Knows arrays and their bytes; knows nothing of links, ranks or models. Unencoded float32 does not
need this module: a link sends the array as it is.

Large messages are encoded faster in int8, since numpy converts float16 one number at a time.
Microseconds for 2,048 and for 1,048,576 numbers on one thread of an AMD EPYC: float16 9 and 2,800
to encode, 4 and 1,700 to decode; int8 11 and 1,060 to encode, 5 and 370 to decode.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

WireFormatName = Literal["float32", "float16", "int8"]
WIRE_FORMATS: tuple[WireFormatName, ...] = get_args(WireFormatName)

BLOCK_NUMBERS = 32
"""Numbers with a common scale in int8."""

_SCALE_BYTES = 4
_STEPS = np.float32(127.00003)
"""Steps from zero to a block's largest magnitude. The excess over code 127 keeps 127 times the
rounded scale at or below the magnitude, hence within float32."""

_LARGEST_FLOAT16 = np.float32(65504)
_MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
_SMALLEST_SCALE = np.float32(1e-36)
"""Avoids division by zero in a block of zeros; values below half of it become 0."""

_MAX_KNOWN_SHAPES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRule:
    """A rule for which float32 messages are encoded, and how; equal at both ends."""

    format: WireFormatName = "float32"
    above_bytes: int = 0
    """Larger arrays are encoded; the others are sent as they are."""

    def __post_init__(self) -> None:
        if self.format not in WIRE_FORMATS:
            raise ValueError(
                f"a wire format is one of {', '.join(WIRE_FORMATS)}, not {self.format!r}"
            )
        if type(self.above_bytes) is not int or self.above_bytes < 0:
            raise ValueError(f"above_bytes of a wire rule is 0 or more, not {self.above_bytes!r}")

    def encodes(self, array: NDArray[Any]) -> bool:
        """Whether `array` is encoded."""
        return (
            self.format != "float32"
            and array.nbytes > self.above_bytes
            and array.dtype == np.float32
        )


class Codec(Protocol):
    """One wire format with its scratch memory; used from one thread.

    Numbers are flat float32, messages flat uint8 of exactly `num_bytes`, aligned to four bytes;
    other sizes are a ValueError. Equal numbers give equal bytes on every device, and equal bytes
    equal numbers.
    """

    def num_bytes(self, count: int) -> int:
        """Bytes of the message that holds `count` numbers."""

    def encode(self, numbers: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Fill `into` with the message that holds `numbers`."""

    def decode(self, message: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        """Fill `into` with the numbers that `message` holds. Any bytes are a message."""


class Float16Codec:
    """Each number rounded to the nearest float16: relative error up to 2^-11, or 3e-8.

    Numbers beyond ±65504, infinity too, become ±65504; NaN stays NaN. See :class:`Codec`.
    """

    def __init__(self) -> None:
        self._clipped = np.empty(0, np.float32)

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, numbers: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        _check_sizes(self, numbers, into)
        if numbers.size > self._clipped.size:
            self._clipped = np.empty(numbers.size, np.float32)
        clipped = self._clipped[: numbers.size]
        np.clip(numbers, -_LARGEST_FLOAT16, _LARGEST_FLOAT16, out=clipped)
        np.copyto(into.view(np.float16), clipped, casting="same_kind")

    def decode(self, message: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        _check_sizes(self, into, message)
        np.copyto(into, message.view(np.float16))


class Int8Codec:
    """Blocks of 32 numbers, each `scale * code` with a code of -127 to 127 (like GGUF's Q8_0).

    A block's scale is its largest magnitude / 127, in float32, so no magnitude is too large and
    each number's error is at most half a scale. The message holds all scales, then all codes; the
    last block may be shorter. A block with infinity or NaN decodes to no finite number, so that
    errors stay visible. See :class:`Codec`.
    """

    def __init__(self) -> None:
        self._store = np.empty(0, np.float32)
        self._known: dict[int, _BlockScratch] = {}

    def num_bytes(self, count: int) -> int:
        return _SCALE_BYTES * _num_blocks(count) + count

    def encode(self, numbers: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        _check_sizes(self, numbers, into)
        count = numbers.size
        if count == 0:
            return
        scratch = self._scratch(count)
        if count % BLOCK_NUMBERS:
            scratch.flat[:count] = numbers
            scratch.flat[count:] = 0
            blocks = scratch.blocks
        else:
            blocks = numbers.reshape(-1, BLOCK_NUMBERS)
        scales, codes = _parts(into, count)
        # As integers, magnitudes have the order of floats, with NaN the largest. Five halvings take
        # a third of the time of one reduction over such short rows.
        np.bitwise_and(blocks.view(np.int32), _MAGNITUDE_BITS, out=scratch.magnitudes)
        for pairs, larger in scratch.halvings:
            np.maximum(pairs[0], pairs[1], out=larger)
        np.divide(scratch.largest, _STEPS, out=scales)
        np.maximum(scales, _SMALLEST_SCALE, out=scales)
        with np.errstate(invalid="ignore"):  # infinity by infinity, and NaN as a code
            quotients = np.divide(blocks, scales.reshape(-1, 1), out=scratch.blocks)
            np.rint(quotients, out=quotients)
            np.copyto(codes, scratch.flat[:count], casting="unsafe")

    def decode(self, message: NDArray[np.uint8], into: NDArray[np.float32]) -> None:
        _check_sizes(self, into, message)
        count = into.size
        if count == 0:
            return
        scales, codes = _parts(message, count)
        is_whole = count % BLOCK_NUMBERS == 0
        flat = into if is_whole else self._scratch(count).flat
        flat[:count] = codes
        blocks = flat.reshape(-1, BLOCK_NUMBERS)
        with np.errstate(invalid="ignore", over="ignore"):  # a stranger's scales may be any bits
            np.multiply(blocks, scales.reshape(-1, 1), out=blocks)
        if not is_whole:
            into[:] = flat[:count]

    def _scratch(self, count: int) -> "_BlockScratch":
        scratch = self._known.get(count)
        if scratch is None:
            numbers = _num_blocks(count) * BLOCK_NUMBERS
            if 3 * numbers > self._store.size:
                self._store = np.empty(3 * numbers, np.float32)
                self._known.clear()  # They are views of the freed memory.
            elif len(self._known) >= _MAX_KNOWN_SHAPES:
                self._known.clear()
            scratch = self._known[count] = _BlockScratch(self._store, numbers)
        return scratch


class _BlockScratch:
    """Views of a codec's memory for one message size; making them takes as long as encoding."""

    def __init__(self, store: NDArray[np.float32], numbers: int) -> None:
        """`numbers`: a multiple of the block size. `store`: has room for three times as many."""
        self.flat = store[:numbers]
        self.blocks = self.flat.reshape(-1, BLOCK_NUMBERS)
        halves = store[numbers : 3 * numbers].view(np.int32)
        self.magnitudes = halves[:numbers].reshape(-1, BLOCK_NUMBERS)
        self.halvings: list[tuple[tuple[NDArray[np.int32], NDArray[np.int32]], Any]] = []
        whole, start = halves[:numbers], numbers
        while whole.size * BLOCK_NUMBERS > numbers:
            larger = halves[start : start + whole.size // 2]
            self.halvings.append(((whole[0::2], whole[1::2]), larger))
            whole, start = larger, start + larger.size
        self.largest = whole.view(np.float32)
        """The largest magnitude of each block."""


def open_codec(name: WireFormatName) -> Codec:
    """A codec with its own scratch memory. ValueError for float32, which needs none."""
    if name == "float32":
        raise ValueError("float32 travels as it is: there is nothing to encode")
    return Float16Codec() if name == "float16" else Int8Codec()


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK_NUMBERS)


def _parts(message: NDArray[np.uint8], count: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """The scales and the codes of an int8 message, without a copy."""
    end = message.size - count
    return message[:end].view(np.float32), message[end:].view(np.int8)


def _check_sizes(codec: Codec, numbers: NDArray[np.float32], message: NDArray[np.uint8]) -> None:
    if message.size != codec.num_bytes(numbers.size):
        raise ValueError(
            f"{numbers.size} numbers take a message of {codec.num_bytes(numbers.size)} bytes, not "
            f"{message.size}"
        )
