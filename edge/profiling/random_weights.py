"""A file of random weights for a shard, for measurements."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import ShardWeights
from edge.errors import CapacityError
from edge.host.disk_rate import TEMPORARY
from edge.offload import DerivedCache, Manifest, TensorEntry
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout, token_table

_BLOCK_BYTES = 4 << 20
_ALIGNMENT = 4096
_STALE_S = 3600.0
_MOST_PACKED_BYTES = 1 << 40
_STRIDE = 8191
"""A prime: each tensor begins at a different element of the block."""


@contextlib.contextmanager
def written_weights(
    layout: ShardLayout, weight_format: WeightFormat, folder: Path, *, packs: bool = False
) -> Iterator[ShardWeights]:
    """A file of random weights for the shard in `folder`, deleted at the end of the block.

    packs: whether to check room for the back end's packed copy, too.

    It takes `written_bytes` of disk. Raises CapacityError if there is no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as own:
        path = Path(own) / "weights"
        try:
            manifest = _write(path, layout, weight_format)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise CapacityError(
                f"the disk of {folder} has no room for the weights of a measurement",
                remedy="free some",
            ) from error
        packed = DerivedCache(Path(own) / "packed", _MOST_PACKED_BYTES) if packs else None
        yield ShardWeights(path=path, manifest=manifest, packed=packed)


def written_bytes(layout: ShardLayout, weight_format: WeightFormat) -> int:
    """Disk bytes of such a file.

    Embedding tables take none: they stay on disk, each token reads a few rows, and whole ones would
    be gigabytes. They are holes in a sparse file and read as zeros.
    """
    matrices = weight_format.recipe.all_stored(layout.matrices)
    sizes = [array.nbytes for matrix in matrices for array in matrix.arrays]
    sizes += [4 * vector.num_elements for vector in layout.vectors]
    sizes.append(4 * len(layout.embedding) * layout.hidden_size)
    return sum(map(_aligned, sizes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _remove_stale(folder: Path) -> None:
    """Remove files left by a killed measurement."""
    for left in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, layout: ShardLayout, weight_format: WeightFormat) -> Manifest:
    """Write random bytes, made once; each tensor begins at a different place in them.

    ONNX Runtime keeps one packed copy of equal weights, which would then stay in the caches.
    """
    codes = np.frombuffer(np.random.default_rng(0).bytes(_BLOCK_BYTES), np.uint8)
    normal = np.random.default_rng(0).standard_normal(_BLOCK_BYTES // 4, dtype=np.float32)
    entries: list[TensorEntry] = []
    with path.open("wb") as file:

        def add(name: str, shape: tuple[int, ...], block: NDArray[Any], hole: bool = False) -> None:
            offset = file.seek(_aligned(file.tell()))
            nbytes = math.prod(shape) * block.itemsize
            if hole:
                file.truncate(file.seek(nbytes, os.SEEK_CUR))
            else:
                data = np.roll(block, _STRIDE * len(entries)).view(np.uint8).data
                for start in range(0, nbytes, len(data)):
                    file.write(data[: nbytes - start])
            entries.append(
                TensorEntry(
                    name=name, dtype=block.dtype.name, shape=shape, offset=offset, nbytes=nbytes,
                    pieces=(),
                )
            )  # fmt: skip

        for matrix in weight_format.recipe.all_stored(layout.matrices):
            made_up = matrix.kind.made_up(len(matrix.part.columns), normal=normal, codes=codes)
            for array in matrix.arrays:
                add(f"{matrix.name}.{array.suffix}", array.shape, made_up[array.suffix])
        for vector in layout.vectors:
            add(vector.name, (vector.num_elements,), np.full(1 << 16, 0.5, np.float32))
        if layout.embedding:
            add("embedding", (len(layout.embedding), layout.hidden_size), normal)
        for number, rows in enumerate(layout.token_tables):
            add(token_table(number), (len(rows), len(layout.token_columns)), normal, hole=True)
        return Manifest(tensors=tuple(entries), total_bytes=file.tell())
