"""The library of Edge's own kernels, if it is installed: `pip install "edge-inference[fast]"`."""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_blocks.reference import (
    OPERATOR_VERSION,
    TILES_VERSION,
    BlockForm,
    BlockParts,
)

DISTRIBUTION = "edge-inference-kernels"
_LIBRARY = "edge_kernels/library.bin"
_SLOW = "plain"
_log = logging.getLogger(__name__)


@functools.cache
def library() -> Path | None:
    """The library, if this processor has fast kernels in it and its file is the one installed."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((file for file in files if str(file) == _LIBRARY), None)
    if found is None or found.hash is None:
        _log.warning("%s is not used: it was installed without the digest of its library",
                     DISTRIBUTION)  # fmt: skip
        return None
    path = Path(str(found.locate()))
    try:
        digest = hashlib.new(found.hash.mode, path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != found.hash.value:
            _log.warning("%s is not used: its library was changed; install it again", DISTRIBUTION)
            return None
        import edge_kernels

        versions = edge_kernels.layout(), edge_kernels.operator()
        if versions != (TILES_VERSION, OPERATOR_VERSION):
            _log.warning("%s is not used: it is of another version of Edge", DISTRIBUTION)
            return None
        return None if edge_kernels.kernels() == _SLOW else path
    except (OSError, AttributeError) as error:
        _log.warning("%s is not used: %s", DISTRIBUTION, error)
        return None


def round_blocks(form: BlockForm, weights: NDArray[np.float32]) -> BlockParts:
    """The blocks that are closest to finite weights [rows, columns of whole blocks].

    Other threads of Python run meanwhile. A block depends on its own weights alone. Raises
    ValueError for a type with a table, and without the library.
    """
    path = library()
    if path is None:
        raise ValueError("this device has no library that rounds weights to blocks")
    blocks = (len(weights), weights.shape[1] // form.block_size)
    runs = (*blocks, form.block_size // form.run if form.has_levels else 0)
    codes = np.empty((*blocks, form.block_size), np.uint8)
    scales, minima = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    levels, least_levels = np.empty(runs, np.uint8), np.empty(runs, np.uint8)
    made: tuple[NDArray[Any], ...] = (codes, scales, minima, levels, least_levels)
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in made]
    source = np.ascontiguousarray(weights, np.float32)
    count = ctypes.c_size_t(blocks[0] * blocks[1])
    call = ctypes.CDLL(str(path)).edge_kernels_round
    if not call(form.number, ctypes.c_void_p(source.ctypes.data), count, *addresses):
        raise ValueError(f"weights are not rounded to blocks of {form.name}")
    signed = levels.view(np.int8) if form.signed_levels else levels
    with np.errstate(over="ignore"):  # the caller checks for weights that are too large
        return BlockParts(
            codes=codes,
            scales=scales.astype(np.float16),
            minima=minima.astype(np.float16) if form.has_minimum else None,
            levels=signed if form.has_levels else None,
            least_levels=least_levels if form.has_levels and form.has_minimum else None,
        )
