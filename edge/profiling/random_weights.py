"""A file of random weights for a shard: what a peer measures itself with."""

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
"""A prime: tensor after tensor begins at another element of the block."""


@contextlib.contextmanager
def written_weights(
    layout: ShardLayout, weight_format: WeightFormat, folder: Path, *, packs: bool = False
) -> Iterator[ShardWeights]:
    """A file of random weights for the shard, in `folder`, until the block ends.

    packs: and room next to it for what a back end makes of them.

    It takes `written_bytes` of the disk. Raises CapacityError where that has no room for them.
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
    """What such a file takes of the disk.

    Tables of tokens take nothing: they stay on disk, a few rows of them are read for each token,
    and whole ones would be gigabytes. So they are holes in the file, of which zeros are read.
    """
    matrices = weight_format.recipe.all_stored(layout.matrices)
    sizes = [array.nbytes for matrix in matrices for array in matrix.arrays]
    sizes += [4 * vector.num_elements for vector in layout.vectors]
    sizes.append(4 * len(layout.embedding) * layout.hidden_size)
    return sum(map(_aligned, sizes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _remove_stale(folder: Path) -> None:
    """What a measurement left that was killed."""
    for left in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, layout: ShardLayout, weight_format: WeightFormat) -> Manifest:
    """Random bytes are made only once, and each tensor begins elsewhere in them.

    Of weights that are equal, ONNX Runtime keeps one packed copy, which then stays in the caches.
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
