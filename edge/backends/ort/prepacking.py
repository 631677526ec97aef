"""Prepacked weights of ONNX Runtime, exchanged under a session.

A session packs each constant weight for its kernels when it is made. It can save the result as
blobs beside the model, and a session made from such files maps the blobs. Here this mapping is
replaced by our own memory; the session then computes the layer whose blobs are read into it.

The format of the blobs depends on the version of ONNX Runtime and on the processor. So three things
are checked, and no version is excluded beforehand. Blobs on disk belong to one `packing_key`, and
another version packs anew. A file whose blobs are described in another way, or are not mapped, is
refused here. Before layers are streamed, one of each kind is computed from exchanged blobs and must
equal a plain session bit for bit (`edge/backends/ort/streaming.py`). If a check fails, a model that
does not fit into memory is not loaded, and the error says why. Models that fit do not use this.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edge.backends.onnx.runtime import ort
from edge.errors import RequestError
from edge.offload import StoreFullError, disk_errors_as_store_errors
from edge.system.pages import (
    FileMapping,
    can_put_memory_over_mappings,
    let_go_of,
    mappings_of,
    memory_over,
)
from edge.system.processor import instructions

PART_ALIGNMENT = 2 << 20
"""Alignment of blobs in a template's file, so that their memory can be huge pages."""

_MODEL, _DATA = "model.onnx", "model.data"
_SAVED = "saved.onnx"
_LAYOUT_VERSION = 3
"""Raised with every change of the packed contents or their order."""

_SMALLEST_WEIGHT = "129"
"""Bytes of the smallest tensor outside the model. Smaller ones are shapes, which graphs need in
it."""

_PACKED = re.compile(r"(?P<kernel>.*?)\|(?P<places>\d+;\d+;\d+(\|\d+;\d+;\d+)*)")
_REMEDY = "give the peer more --memory, share the model with more peers, or try another onnxruntime"
_COPY_BYTES = 1 << 20
_FULL_BYTES = 1 << 20
"""Free bytes below which a failed write counts as a full disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One packed weight: its original tensor, and its place in the template's file."""

    weight: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A graph with packed weights on disk, from which sessions are made."""

    folder: Path
    blobs: tuple[Blob, ...]

    def read(self, blob: Blob) -> NDArray[np.uint8]:
        """The blob as a mapped view of its file."""
        return np.memmap(self.folder / _DATA, np.uint8, "r", blob.offset, (blob.nbytes,))


def packing_key() -> str:
    """A key that changes whenever kernels may pack in another way."""
    flags = " ".join(instructions()) or platform.processor()
    return f"{_LAYOUT_VERSION} onnxruntime {ort.__version__} {platform.machine()} {flags}"


def make_template(
    model: bytes, *, weights_folder: str, folder: Path, options: Callable[[], ort.SessionOptions]
) -> Template:
    """Pack the graph's weights and lay them out in `folder`, each blob at PART_ALIGNMENT.

    In ONNX Runtime's file small blobs share pages; here each has its own, so that each mapping can
    be replaced alone. Raises StoreFullError if the disk is full.
    """
    saving = options()
    for key, value in (
        ("session.model_external_initializers_file_folder_path", weights_folder),
        ("session.save_external_prepacked_constant_initializers", "1"),
        ("session.optimized_model_external_initializers_file_name", f"{_SAVED}.data"),
        ("session.optimized_model_external_initializers_min_size_in_bytes", _SMALLEST_WEIGHT),
    ):
        saving.add_session_config_entry(key, value)
    saving.optimized_model_filepath = str(folder / _SAVED)
    try:
        ort.InferenceSession(model, saving, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises plain exceptions
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            raise StoreFullError(
                f"the disk is full and {folder} cannot take the weights packed for this device; "
                "free some room and try again"
            ) from error
        raise
    (folder / f"{_SAVED}.data").touch()  # a graph may have no matrices
    saved = onnx.load(str(folder / _SAVED), load_external_data=False)
    products = [node for node in saved.graph.node if node.op_type == "MatMulNBits"]
    scales = {node.input[2] for node in products}  # packed together with the codes
    # Kernels of some processors read these unpacked, and ONNX Runtime leaves few in the model.
    zero_points = {node.input[3] for node in products if len(node.input) > 3}
    blobs: list[Blob] = []
    with (
        disk_errors_as_store_errors(folder),
        (folder / f"{_SAVED}.data").open("rb") as source,
        (folder / _DATA).open("wb") as target,
    ):
        layout = _Layout(source, target)
        for tensor in saved.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                if tensor.name in zero_points:
                    at, nbytes = layout.write(tensor.raw_data), len(tensor.raw_data)
                    blobs.append(Blob(weight=tensor.name, offset=at, nbytes=nbytes))
                    _move_out(tensor, at, nbytes)
                continue
            entries = {entry.key: entry for entry in tensor.external_data}
            packed = [entry for key, entry in entries.items() if key.startswith("prepacked_")]
            offset, nbytes = int(entries["offset"].value), int(entries["length"].value)
            moved = layout.copy(offset, nbytes)
            entries["location"].value, entries["offset"].value = _DATA, str(moved)
            for entry in packed:
                kernel, places = _packed_places(entry.value)
                moved_to = []
                for start, length, rest in places:
                    at = layout.copy(start, length)
                    blobs.append(Blob(weight=tensor.name, offset=at, nbytes=length))
                    moved_to.append(f"{at};{length};{rest}")
                entry.value = f"{kernel}|{'|'.join(moved_to)}"
            if not packed and tensor.name not in scales:
                blobs.append(Blob(weight=tensor.name, offset=moved, nbytes=nbytes))
    (folder / _MODEL).write_bytes(saved.SerializeToString())
    for leftover in (_SAVED, f"{_SAVED}.data"):
        (folder / leftover).unlink()
    return Template(folder=folder, blobs=tuple(blobs))


def _packed_places(said: str) -> tuple[str, list[tuple[int, int, str]]]:
    """The kernel that packed a weight, and of each blob its offset, its bytes and the rest.

    Raises RequestError for a description in another format.
    """
    match = _PACKED.fullmatch(said)
    if match is None:
        raise RequestError(
            f"this onnxruntime ({ort.__version__}) describes packed weights in an unknown way, so "
            "they cannot be streamed",
            remedy=_REMEDY,
        )
    places = (place.split(";") for place in match["places"].split("|"))
    return match["kernel"], [(int(start), int(length), rest) for start, length, rest in places]


def _move_out(tensor: onnx.TensorProto, offset: int, nbytes: int) -> None:
    """Replace a tensor of the model by its place in the template's file."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", _DATA), ("offset", str(offset)), ("length", str(nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


class _Layout:
    """Copies byte ranges of a file, and other bytes, to aligned places in another file."""

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._end = 0

    def copy(self, offset: int, nbytes: int) -> int:
        start = self._begin(nbytes)
        self._source.seek(offset)
        for done in range(0, nbytes, _COPY_BYTES):
            self._target.write(self._source.read(min(_COPY_BYTES, nbytes - done)))
        return start

    def write(self, content: bytes) -> int:
        start = self._begin(len(content))
        self._target.write(content)
        return start

    def _begin(self, nbytes: int) -> int:
        start = -(-self._end // PART_ALIGNMENT) * PART_ALIGNMENT
        self._target.seek(start)
        self._end = start + nbytes
        return start


@dataclass(frozen=True, slots=True)
class LooseSession:
    """A session and the memory for its packed weights, one part for each blob.

    The parts are valid as long as the session lives. Each is whole pages that are allocated when
    they are written, with the blob at its start.
    """

    session: ort.InferenceSession
    parts: tuple[memoryview, ...]
    weights: tuple[str, ...]
    """The tensor from which each part was packed."""


def open_loose(template: Template, *, options: Callable[[], ort.SessionOptions]) -> LooseSession:
    """A session without weights.

    Raises RequestError if the system refuses to replace the mappings.
    """
    session = ort.InferenceSession(
        str(template.folder / _MODEL), options(), providers=["CPUExecutionProvider"]
    )
    if not can_put_memory_over_mappings():
        raise RequestError(
            "on this system layers cannot be read from disk while a model is computed",
            remedy="give the peer more --memory, or share the model with more peers",
        )
    # Mappings of earlier sessions were replaced already. The list is read once, because it has
    # thousands of lines.
    mappings = tuple(mappings_of(template.folder / _DATA))
    # The original tensors were read for a comparison, and are not read again.
    let_go_of(mappings)
    parts = tuple(_own_memory(blob, mappings) for blob in template.blobs)
    return LooseSession(session, parts, tuple(blob.weight for blob in template.blobs))


def _own_memory(blob: Blob, mappings: Sequence[FileMapping]) -> memoryview:
    found = [
        start + blob.offset - offset
        for start, end, offset in mappings
        if offset <= blob.offset and blob.offset + blob.nbytes <= offset + end - start
    ]
    if len(found) != 1:
        raise RequestError(
            f"this onnxruntime ({ort.__version__}) does not map its packed weights, so they "
            "cannot be streamed",
            remedy=_REMEDY,
        )
    memory = memory_over(found[0], blob.nbytes)
    if memory is None:
        raise RequestError("the system refuses to map memory for streamed weights", remedy=_REMEDY)
    return memory
