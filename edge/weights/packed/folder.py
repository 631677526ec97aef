"""Quantised folders: their layout, and their weights as floats.

A layout is a file with its classes, and a line in the table here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import CheckpointError, shown
from edge.models.config import Config
from edge.offload import Closing, WeightStore, checked_runs
from edge.text.files import read_json
from edge.weights.fused_rows import TensorPart
from edge.weights.packed.awq import find_awq
from edge.weights.packed.blocks import METHOD, find_blocks
from edge.weights.packed.compressed import find_compressed
from edge.weights.packed.fp8 import find_fp8
from edge.weights.packed.gptq import find_gptq
from edge.weights.packed.matrix import PackedMatrix, Tensors, rows_of
from edge.weights.packed.mlx import find_mlx
from edge.weights.packed.mxfp4 import BLOCKS, find_mxfp4
from edge.weights.packed.nvfp4 import find_modelopt

LAYOUTS: Mapping[str, Callable[[Config, Tensors], dict[str, PackedMatrix]]] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed,
    "fp8": find_fp8,
    "mlx": find_mlx,
    "mxfp4": find_mxfp4,
    "modelopt": find_modelopt,
    METHOD: find_blocks,
}
"""Layouts by `quant_method`. MLX has none, but another name for the whole setting."""

_PACKINGS = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "awq", "awq": "awq"}
"""Layouts by the end of AutoRound's `packing_format`."""

_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json that older tools wrote its quantization_config to."""
_CODES = ".qweight"
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}

_NOT_READ = {
    "bitsandbytes": "bitsandbytes has no layout of its own on disk that others read",
    "hqq": "the layout of HQQ is its library's own",
}
_READING_VERSION = "1"
"""Part of fingerprints. Raise it when the same files give other numbers."""
_MARKS = (
    *(BLOCKS, ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".scales"),
    ".weight_shape",
)


def with_quantization(
    config: Mapping[str, Any], folder: Path, tensors: Collection[str]
) -> Mapping[str, Any]:
    """The values of config.json with the quantization_config of an older file beside it. The same
    for a folder without packed tensors."""
    if config.get("quantization_config") is not None or config.get("quantization") is not None:
        return config
    if not any(each.endswith(_CODES) for each in tensors):
        return config
    for name, method in _OLD_FILES.items():
        if (folder / name).is_file():
            values = {
                _OLD_NAMES.get(key, key): each for key, each in read_json(folder / name).items()
            }
            return {**config, "quantization_config": {"quant_method": method, **values}}
    return config


class PackedStore(Closing):
    """A WeightStore over a folder's tensors, in which packed matrices are floats.

    Closes the store under it. as_float16: packed matrices that are read as float16, not float32.
    """

    def __init__(
        self,
        store: WeightStore,
        packed: Mapping[str, PackedMatrix],
        *,
        method: str,
        settings: object,
        as_float16: Collection[str],
    ) -> None:
        self.stored = store
        """The store of the files' tensors."""
        self.method = method
        """The name of the layout."""
        self._as_float16 = frozenset(as_float16)
        self.packed = dict(packed)
        hidden = {name for matrix in packed.values() for name in matrix.tensors}
        self._names = tuple(sorted((set(store.names()) - hidden) | set(packed)))
        told = json.dumps(
            [_READING_VERSION, [method, settings], sorted(self._as_float16)], sort_keys=True
        )
        digest = hashlib.sha256(f"{store.fingerprint}\0{told}".encode())
        self.fingerprint = digest.hexdigest()[:32]
        """Hash of the store's fingerprint, and of the way of reading."""

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.packed[name].shape if name in self.packed else self.stored.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        if name in self.packed:
            return np.dtype(np.float16 if name in self._as_float16 else np.float32)
        return self.stored.dtype(name)

    def where(self, name: str) -> str:
        return self.stored.where(self.packed[name].tensors[0] if name in self.packed else name)

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> NDArray[Any]:
        matrix = self.packed.get(name)
        if matrix is None:
            return self.stored.read(name, rows=rows, columns=columns)
        height, width = matrix.shape
        rows, columns = checked_runs(
            matrix.shape,
            range(height) if rows is None else rows,
            range(width) if columns is None else columns,
        )
        with np.errstate(over="ignore"):  # the caller checks for infinity
            return matrix.floats(rows, columns).astype(self.dtype(name), copy=False)

    def close(self) -> None:
        self.stored.close()


def packed_store(
    values: Mapping[str, Any],
    store: WeightStore,
    *,
    source: str,
    embedding: str,
    parts: Mapping[str, TensorPart] | None = None,
) -> WeightStore:
    """`store`, or a store in which its packed matrices are floats.

    values: of config.json. parts: matrices that are rows of others. Raises CheckpointError, with
    the remedy, for an unsupported layout.
    """
    tensors = Tensors(store, source)
    settings, method = _method(values, tensors)
    if method is None:
        for mark in _MARKS:
            if layers := tensors.names(mark):
                raise tensors.error(
                    layers[0] + mark,
                    "is of quantised weights, and there is no quantization_config",
                    "download config.json of the same folder",
                )
        return store
    packed = LAYOUTS[method](Config(settings, source=f"{source}: quantization_config"), tensors)
    if not packed:
        return store
    packed = _taken_apart(packed, parts or {})
    return PackedStore(store, packed, method=method, settings=settings, as_float16=(embedding,))


def _taken_apart(
    packed: Mapping[str, PackedMatrix], parts: Mapping[str, TensorPart]
) -> dict[str, PackedMatrix]:
    found = dict(packed)
    for name, part in parts.items():
        whole = packed.get(part.tensor)
        if whole is not None and part.extent[0] <= whole.shape[0]:
            found.pop(part.tensor, None)
            (rows,) = part.runs(range(part.num_rows))
            found[name] = rows_of(whole, rows)
    return found


def _method(values: Mapping[str, Any], tensors: Tensors) -> tuple[Mapping[str, Any], str | None]:
    config = Config(values, source=tensors.source)
    own = config.mapping("quantization")
    settings = config.mapping("quantization_config") or own
    if not settings:
        return {}, None
    method = settings.get("quant_method")
    if method is None and (own or tensors.names(".biases")):
        method = "mlx"
    if method == "auto-round":
        method = _PACKINGS.get(str(settings.get("packing_format")).rpartition(":")[2], method)
    if isinstance(method, str) and method in LAYOUTS:
        return settings, method
    known = method if isinstance(method, str) else ""
    reason = f" ({_NOT_READ[known]})" if known in _NOT_READ else ""
    raise CheckpointError(
        f"{tensors.source}: this checkpoint is already quantised (quantization_config), by "
        f"{shown(method)}, which is not read{reason}",
        remedy=f"{', '.join(LAYOUTS)} are: use such a folder, or the original float checkpoint, "
        "which Edge quantises itself",
    )
