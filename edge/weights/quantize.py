"""Rounds a checkpoint's matrices to blocks, once, into a cache on the disk.

The cache has a folder for each checkpoint, rounding and version of it, and in it a safetensors
file for each layer, which appears when it is complete. Knows names of matrices, and no models.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from edge.errors import CheckpointError
from edge.host.cgroup import usable_cores
from edge.offload import (
    FolderCache,
    SafetensorsFile,
    SafetensorsWriter,
    StoreCorruptError,
    StoreError,
    WeightStore,
)
from edge.weights.quantized_store import (
    QuantizedStore,
    Rounding,
    store_errors_as_edge_errors,
    tensors_of,
)
from edge.weights.weight_limits import check_weights
from edge.weights.writer_lock import only_writer

__all__ = ["DEFAULT_LIMIT_BYTES", "QuantizedStore", "open_quantized"]

DEFAULT_LIMIT_BYTES = 64 * 1024**3
# Part of the folder's name: raise it when roundings make other arrays.
_ROUNDING_VERSION = 1
# Weights that one thread reads, rounds and writes at a time: large for disks, small for memory.
_CHUNK_WEIGHTS = 4 * 1024 * 1024
_MAX_THREADS = 8

_Shapes = Mapping[str, tuple[int, int]]
_Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def open_quantized(
    store: WeightStore,
    matrices: Sequence[str],
    rounding: Rounding,
    *,
    cache_root: Path,
    progress: Callable[[int, int], None] | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> QuantizedStore:
    """The named matrices of `store`, quantised now unless they are in the cache.

    Finished parts of an interrupted call are reused; a second process waits for the first and uses
    its result. progress: called with (weights done, weights in all) from this thread. Folders of
    other checkpoints are evicted, the least recently used first, to stay within `limit_bytes`.
    `store` may be closed afterwards.

    Raises CheckpointError for a matrix that is missing, damaged or not finite, CapacityError if the
    limit or the disk is too small.
    """
    name = f"{store.fingerprint}-{rounding.key}-v{_ROUNDING_VERSION}"
    with store_errors_as_edge_errors(), contextlib.ExitStack() as on_error:
        shapes = {matrix: _matrix_shape(store, matrix) for matrix in matrices}
        wanted = tensors_of(rounding, shapes)
        folders = FolderCache(cache_root, limit_bytes)
        with folders.locked():
            use = folders.use(name)
        on_error.callback(use.close)
        if not wanted.items() <= _tensors_in(use.folder).items():
            total = sum(map(math.prod, shapes.values()))
            with only_writer(use.folder, lambda: progress and progress(0, total)):
                present = _tensors_in(use.folder, remove_damaged=True)
                missing = {
                    matrix: shape
                    for matrix, shape in shapes.items()
                    if not tensors_of(rounding, {matrix: shape}).items() <= present.items()
                }
                _make_room(folders, use.folder, tensors_of(rounding, missing))
                _quantize_missing(store, missing, shapes, use.folder, rounding, progress)
        places = _open_files(use.folder, wanted)
        on_error.pop_all()
    return QuantizedStore(use, places, shapes, rounding)


def _quantize_missing(
    store: WeightStore,
    missing: _Shapes,
    shapes: _Shapes,
    folder: Path,
    rounding: Rounding,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write a file for each group of the missing matrices."""
    total = sum(map(math.prod, shapes.values()))
    done = total - sum(map(math.prod, missing.values()))
    report = progress or (lambda _done, _total: None)
    report(done, total)
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shape in missing.items():
        groups.setdefault(_group(name), {})[name] = shape
    threads = min(_MAX_THREADS, usable_cores())
    with ThreadPoolExecutor(threads) as pool:  # numpy and the disk release the interpreter's lock
        for group, members in groups.items():
            path = folder / _file_name(group, members)
            with SafetensorsWriter(path, tensors_of(rounding, members)) as writer:
                parts = [
                    pool.submit(_quantize_rows, store, writer, name, rows, rounding)
                    for name, shape in members.items()
                    for rows in row_chunks(shape)
                ]
                try:
                    for part in parts:
                        done += part.result()
                        report(done, total)
                finally:  # end all threads before the writer closes its file
                    for part in parts:
                        part.cancel()
                    wait(parts)


def _quantize_rows(
    store: WeightStore,
    writer: SafetensorsWriter,
    name: str,
    rows: range,
    rounding: Rounding,
) -> int:
    """Quantize and write some rows. Returns their number of weights."""
    weight = store.read(name, rows=rows)
    try:
        arrays, largest = rounding.rounded(weight)
    except ValueError as error:
        raise CheckpointError(
            f"tensor {name} in {store.where(name)} cannot be quantised: {error}",
            remedy="the checkpoint is damaged, fetch it again",
        ) from error
    check_weights(store, name, largest)
    for suffix, array in arrays.items():
        writer.write_rows(f"{name}.{suffix}", rows.start, array)
    return weight.size


def _make_room(folders: FolderCache, folder: Path, new: _Tensors) -> None:
    present_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    item_bytes = {"U8": 1, "F32": 4}
    new_bytes = sum(math.prod(shape) * item_bytes[dtype] for dtype, shape in new.values())
    with folders.locked():
        folders.make_room(folder.name, present_bytes + new_bytes, on_disk_bytes=present_bytes)


def _tensors_in(
    folder: Path, *, remove_damaged: bool = False
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{tensor: (type, shape)} of complete and undamaged files."""
    present: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in folder.glob("*.safetensors"):
        try:
            file = SafetensorsFile(path)
        except StoreError:
            if remove_damaged:
                path.unlink(missing_ok=True)
            continue
        with file:
            present |= {name: (place.dtype, place.shape) for name, place in file.tensors.items()}
    return present


def _open_files(folder: Path, wanted: _Tensors) -> dict[str, SafetensorsFile]:
    """{wanted tensor: its file}. Raises StoreCorruptError if one has disappeared."""
    with contextlib.ExitStack() as opened:
        places: dict[str, SafetensorsFile] = {}
        for path in folder.glob("*.safetensors"):
            file = opened.enter_context(SafetensorsFile(path))
            here = {name: file for name in file.tensors if name in wanted}
            if here:
                places |= here
            else:
                file.close()
        if places.keys() != wanted.keys():
            raise StoreCorruptError(f"{folder} was changed while it was opened; open it again")
        opened.pop_all()
    return places


def _matrix_shape(store: WeightStore, name: str) -> tuple[int, int]:
    shape = store.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(
            f"tensor {name} has the shape {list(shape)} where a matrix was expected: the "
            "checkpoint does not fit its config.json"
        )
    return shape[0], shape[1]


def _group(name: str) -> str:
    """The name up to its first number, which is equal within a layer, or else the whole name."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found.group() if found else name


def _file_name(group: str, members: _Shapes) -> str:
    """A file name that is unique for this set of matrices, so that no other set replaces it."""
    digest = hashlib.sha256("\0".join(members).encode()).hexdigest()[:12]
    plain = re.sub(r"[^\w.-]", "_", group, flags=re.ASCII)[:100]
    return f"{plain}-{digest}.safetensors"


def row_chunks(shape: tuple[int, int]) -> list[range]:
    """Rows that are read and written at a time."""
    step = max(1, _CHUNK_WEIGHTS // shape[1])
    return [range(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]
