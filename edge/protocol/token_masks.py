"""Masks of allowed tokens in a payload: for each request one mask for each row of which a token is
chosen.

A mask is a number of token ids and these, as uint32, where that is shorter than a bit for each
token of the vocabulary. Else it is 0 and the bits. So the masks of a text that a grammar forces
take some 50 bytes each, and one of any text 19 KB for 150,000 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge.errors import ProtocolError
from edge.kernels.sampling.rules import Bits, ids_of
from edge.protocol.step import MAX_REQUESTS, MOST_DRAFTED
from edge.transport.frame import Buffer

_COUNT: np.dtype[np.uint32] = np.dtype("<u4")

PackedMask: TypeAlias = Bits | NDArray[np.uint32]
"""A view of the payload: bits, or ids. Bits of ids would take a thousand times the memory."""


def most_mask_bytes(requests: int, vocab_size: int) -> int:
    """Most bytes of the masks of a step: one for each of so many requests, or those of a draft."""
    rows = max(min(requests, MAX_REQUESTS), 1 + MOST_DRAFTED)
    return rows * (_COUNT.itemsize + _bit_bytes(vocab_size))


def write_masks(masks: Iterable[Bits]) -> bytes:
    parts = []
    for bits in masks:
        ids = ids_of(bits, _most_ids(len(bits)))
        parts.append(_COUNT.type(0 if ids is None else len(ids)).tobytes())
        parts.append(bits.tobytes() if ids is None else ids.astype(_COUNT).tobytes())
    return b"".join(parts)


def read_masks(
    requests: Sequence[str], rows: int, payload: Buffer, vocab_size: int
) -> Mapping[str, Sequence[PackedMask]]:
    """The masks by request, `rows` of each. Raises ProtocolError for a payload that `write_masks`
    cannot make, and for a mask without any token."""
    packed, size, start = memoryview(payload), _bit_bytes(vocab_size), 0
    found: dict[str, list[PackedMask]] = {request: [] for request in requests}
    for each in found.values():
        for _row in range(rows):
            count = int.from_bytes(packed[start : start + _COUNT.itemsize], "little")
            start += _COUNT.itemsize
            stop = start + (count * _COUNT.itemsize if count else size)
            if count > _most_ids(size) or stop > len(packed):
                raise ProtocolError(
                    f"{len(packed)} bytes for {rows} masks each of {len(requests)} requests"
                )
            content = packed[start:stop]
            mask: PackedMask = (
                np.frombuffer(content, _COUNT) if count else np.frombuffer(content, np.uint8)
            )
            _check(mask, vocab_size)
            each.append(mask)
            start = stop
    if start != len(packed):
        raise ProtocolError(
            f"{len(packed)} bytes for {rows} masks each of {len(requests)} requests"
        )
    return found


def unpacked(mask: PackedMask, vocab_size: int) -> Bits:
    """A bit for each token of the vocabulary."""
    if mask.dtype == np.uint8:
        return mask.view(np.uint8)
    bits = np.zeros(_bit_bytes(vocab_size), np.uint8)
    np.bitwise_or.at(bits, mask >> 3, (1 << (mask & 7)).astype(np.uint8))
    return bits


def _bit_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 8)


def _most_ids(bit_bytes: int) -> int:
    """Most ids that are not longer than the bits."""
    return bit_bytes // _COUNT.itemsize


def _check(mask: PackedMask, vocab_size: int) -> None:
    if mask.dtype == np.uint8:
        if not mask.any():
            raise ProtocolError("a mask allows no token")
        is_outside = bool(mask[-1] >> ((vocab_size - 1) % 8 + 1))
    else:
        is_outside = bool((mask >= vocab_size).any())
    if is_outside:
        raise ProtocolError(f"a mask has tokens outside a vocabulary of {vocab_size}")
