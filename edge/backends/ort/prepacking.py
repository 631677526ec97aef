"""Prepacked weights of ONNX Runtime: taken out of it, and put back into it.

A session packs each constant weight for its kernels when it is made. It can save the result as
blobs next to the model, and a session made from such files keeps the blobs mapped. Here the mapping
of a session's blobs is replaced by memory of our own; the session then computes the layer whose
blobs are read into that memory.

The format of the blobs depends on the version of ONNX Runtime and on the processor. So three things
are checked, and no version is excluded beforehand. Blobs on disk are of one `packing_key`: another
version packs anew. A file whose blobs are described in another way, or are not mapped, is refused
here. And before layers are streamed, one of each kind is computed from exchanged blobs, and must
equal a plain session bit for bit (`edge/backends/ort/streaming.py`). If one of these fails, a model
that does not fit into memory is not loaded, and the error says why; a model that fits does not come
here.
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

from edge.backends.ort.page_pool import own_memory
from edge.backends.ort.runtime import ort
from edge.errors import RequestError
from edge.host.mapped_file import Mapping, let_go_of, mappings_of
from edge.offload import StoreFullError, disk_errors_as_store_errors

PART_ALIGNMENT = 2 << 20
"""Blobs in a template's file are aligned to this: mapped there, memory comes in huge pages."""

_MODEL, _DATA = "model.onnx", "model.data"
_SAVED = "saved.onnx"
_LAYOUT_VERSION = 3
"""Raised with every change of what is packed here, and in which order."""

_SMALLEST_WEIGHT = "129"
"""Bytes. What is smaller is no matrix but a shape, which graphs need within the model."""

_PACKED = re.compile(r"(?P<kernel>.*?)\|(?P<places>\d+;\d+;\d+(\|\d+;\d+;\d+)*)")
_REMEDY = "give the peer more --memory, share the model with more peers, or try another onnxruntime"
_COPY_BYTES = 1 << 20
_FULL_BYTES = 1 << 20
"""A disk with less than this left when something could not be written was full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One packed weight: what it was packed from, and where it lies in the template's file."""

    weight: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A graph with packed weights on disk, from which sessions are made."""

    folder: Path
    blobs: tuple[Blob, ...]

    def read(self, blob: Blob) -> NDArray[np.uint8]:
        """The blob as a view of its file, so that it takes no memory before it is read."""
        return np.memmap(self.folder / _DATA, np.uint8, "r", blob.offset, (blob.nbytes,))


def packing_key() -> str:
    """Changes whenever the kernels may pack another way."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                flags = line.partition(":")[2].strip()
                break
    except OSError:
        flags = platform.processor()
    return f"{_LAYOUT_VERSION} onnxruntime {ort.__version__} {platform.machine()} {flags}"


def make_template(
    model: bytes, *, weights_folder: str, folder: Path, options: Callable[[], ort.SessionOptions]
) -> Template:
    """Pack the graph's weights and lay them out in `folder`, each blob at PART_ALIGNMENT.

    Small blobs share pages with their neighbours in what ONNX Runtime writes; here none does, so
    each one's mapping is its alone. Raises StoreFullError when the disk is full.
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
                f"the disk is full, {folder} cannot take the weights that are packed for this "
                "device; free some room and try again"
            ) from error
        raise
    (folder / f"{_SAVED}.data").touch()  # a graph may have no matrices
    saved = onnx.load(str(folder / _SAVED), load_external_data=False)
    products = [node for node in saved.graph.node if node.op_type == "MatMulNBits"]
    scales = {node.input[2] for node in products}  # packed together with the codes
    # Some processors' kernels read these as they are, and ONNX Runtime leaves few in the model.
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
    """The kernel that packed a weight, and of each of its blobs offset, bytes and what follows.

    Raises RequestError where ONNX Runtime says it in another way.
    """
    match = _PACKED.fullmatch(said)
    if match is None:
        raise RequestError(
            f"this onnxruntime ({ort.__version__}) describes packed weights in a way that is not "
            "known, so they cannot be streamed",
            remedy=_REMEDY,
        )
    places = (place.split(";") for place in match["places"].split("|"))
    return match["kernel"], [(int(start), int(length), rest) for start, length, rest in places]


def _move_out(tensor: onnx.TensorProto, offset: int, nbytes: int) -> None:
    """Move a tensor of the model to where it lies in the template's file."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", _DATA), ("offset", str(offset)), ("length", str(nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


class _Layout:
    """Copies runs of one file, and other bytes, to aligned places in another."""

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
    """A session and the memory that its packed weights are read into, one part for each blob.

    The parts stay valid as long as the session lives. Each is whole pages, the blob at its start,
    and takes no memory until something is written to it.
    """

    session: ort.InferenceSession
    parts: tuple[memoryview, ...]
    weights: tuple[str, ...]
    """What each part was packed from."""


def open_loose(template: Template, *, options: Callable[[], ort.SessionOptions]) -> LooseSession:
    """A session whose weights are not there yet.

    Raises RequestError where the system does not let memory be put there.
    """
    session = ort.InferenceSession(
        str(template.folder / _MODEL), options(), providers=["CPUExecutionProvider"]
    )
    # Where earlier sessions had blobs, the file is not mapped any more. Read once: the list has a
    # line for each place of the process, and there are thousands.
    mappings = tuple(mappings_of(template.folder / _DATA))
    # What the blobs were packed from was read for a comparison, and never will be again.
    let_go_of(mappings)
    parts = tuple(_own_memory(blob, mappings) for blob in template.blobs)
    return LooseSession(session, parts, tuple(blob.weight for blob in template.blobs))


def _own_memory(blob: Blob, mappings: Sequence[Mapping]) -> memoryview:
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
    return own_memory(found[0], blob.nbytes)
