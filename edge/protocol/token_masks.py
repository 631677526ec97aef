"""Masks of allowed tokens in a payload: for each request one bit for each token of the
vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge.errors import ProtocolError
from edge.kernels.sampling.rules import Bits
from edge.transport.frame import Buffer


def mask_bytes(vocab_size: int) -> int:
    """Bytes of one request's mask."""
    return -(-vocab_size // 8)


def write_masks(masks: Sequence[Bits]) -> bytes:
    return b"".join(each.tobytes() for each in masks)


def read_masks(requests: Sequence[str], payload: Buffer, vocab_size: int) -> Mapping[str, Bits]:
    """The masks by request. Raises ProtocolError for a payload that `write_masks` cannot make, and
    for a mask without any token."""
    size = mask_bytes(vocab_size)
    if len(payload) != len(requests) * size:
        raise ProtocolError(f"{len(payload)} bytes for the masks of {len(requests)} requests")
    rows = np.frombuffer(payload, np.uint8).reshape(len(requests), size)
    if requests and (rows[:, -1] >> ((vocab_size - 1) % 8 + 1)).any():
        raise ProtocolError(f"a mask has tokens outside a vocabulary of {vocab_size}")
    if not rows.any(axis=1).all():
        raise ProtocolError("a mask allows no token")
    return dict(zip(requests, rows, strict=True))
