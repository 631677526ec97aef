"""A file of random weights for a shard: what a peer measures itself with."""

from __future__ import annotations

import contextlib
import errno
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
from edge.offload import Manifest, TensorEntry
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout, token_table

_BLOCK_BYTES = 4 << 20
_STALE_S = 3600.0
_STRIDE = 8191
"""A prime: tensor after tensor begins at another element of the block."""


@contextlib.contextmanager
def written_weights(
    layout: ShardLayout, weight_format: WeightFormat, folder: Path
) -> Iterator[ShardWeights]:
    """A file of random weights for the shard, in `folder`, until the block ends.

    Raises CapacityError when the disk has no room for it.
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
        yield ShardWeights(path=path, manifest=manifest)


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

        def add(name: str, shape: tuple[int, ...], block: NDArray[Any]) -> None:
            offset = -(-file.tell() // 4096) * 4096
            file.seek(offset)
            nbytes = int(np.prod(shape, dtype=np.int64)) * block.itemsize
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
            add(token_table(number), (len(rows), len(layout.token_columns)), normal)
        return Manifest(tensors=tuple(entries), total_bytes=file.tell())
