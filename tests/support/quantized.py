"""A small checkpoint and its quantised cache."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edge.kernels.matmul_nbits.reference import QuantizedMatrix
from edge.offload import MemoryStore
from edge.weights.quantize import QuantizedStore, open_quantized
from edge.weights.quantized_store import QuantizedFormat

random = np.random.default_rng(0)


def weight(rows: int, columns: int) -> NDArray[Any]:
    return random.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)


TENSORS: dict[str, NDArray[Any]] = {
    "model.layers.0.up": weight(48, 72),
    "model.layers.0.down": weight(40, 200),
    "model.layers.1.up": weight(48, 72),
    "model.layers.10.up": weight(9, 64),
    "head": weight(70, 72),
    "norm": np.ones(72, np.float32),
    "ids": np.ones((2, 2), np.int64),
}
MATRICES = tuple(name for name, tensor in TENSORS.items() if name not in {"norm", "ids"})


def open_here(
    root: Path,
    matrices: tuple[str, ...] = MATRICES,
    tensors: dict[str, NDArray[Any]] = TENSORS,
    **options: Any,
) -> QuantizedStore:
    options = {"bits": 4, "block_size": 32} | options
    names = ("bits", "block_size", "zero_points")
    rounding = QuantizedFormat(**{name: options.pop(name) for name in names if name in options})
    return open_quantized(MemoryStore(tensors), matrices, rounding, cache_root=root, **options)


def assert_same(got: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales, expected.scales)
    assert (got.bits, got.block_size, got.columns) == (
        expected.bits, expected.block_size, expected.columns
    )  # fmt: skip


def files(root: Path) -> dict[str, tuple[int, int]]:
    """{file: what tells it from one that was made later, however soon}."""
    found = {path.name: path.stat() for path in root.glob("*/*.safetensors")}
    return {name: (status.st_ino, status.st_ctime_ns) for name, status in found.items()}
