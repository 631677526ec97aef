"""Weights in the form ONNX Runtime's kernels want them: taken out of it, and put back into it.

A session packs each constant weight for its kernels when it is made. It can save what it packed, as
blobs beside the model, and a session made from such files keeps the blobs where they are mapped.
Here one session is made per slot, and memory of our own is put where its blobs lie; whichever
layer's blobs are then read into that memory, the session computes that layer. The format of the
blobs is the kernels' own affair: it depends on the version of ONNX Runtime and on the processor.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edge.backends.onnx_runtime import ort
from edge.errors import RequestError

PART_ALIGNMENT = 2 << 20
"""Of blobs in the file of a template: mapped at such an offset, memory comes in huge pages."""

_MODEL, _DATA = "model.onnx", "model.data"
_SAVED = "saved.onnx"
_LAYOUT_VERSION = 1
"""Of what is packed here, and in which order: count it up with every change."""

_SMALLEST_WEIGHT = "129"
"""Bytes. What is smaller is no matrix but a shape, which graphs need within the model."""

_PACKED = re.compile(r"(?P<kernel>.*)\|(?P<places>[0-9;|]+)$")
_MAP_FIXED, _MADV_HUGEPAGE = 0x10, 14


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
        return np.fromfile(self.folder / _DATA, np.uint8, blob.nbytes, offset=blob.offset)


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
    each one's mapping is its alone.
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
    ort.InferenceSession(model, saving, providers=["CPUExecutionProvider"])
    saved = onnx.load(str(folder / _SAVED), load_external_data=False)
    scales = {
        node.input[2] for node in saved.graph.node if node.op_type == "MatMulNBits"
    }  # packed together with the codes
    blobs: list[Blob] = []
    with (folder / f"{_SAVED}.data").open("rb") as source, (folder / _DATA).open("wb") as target:
        layout = _Layout(source, target)
        for tensor in saved.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            entries = {entry.key: entry for entry in tensor.external_data}
            packed = [entry for key, entry in entries.items() if key.startswith("prepacked_")]
            offset, nbytes = int(entries["offset"].value), int(entries["length"].value)
            moved = layout.copy(offset, nbytes)
            entries["location"].value, entries["offset"].value = _DATA, str(moved)
            for entry in packed:
                match = _PACKED.match(entry.value)
                assert match is not None, entry.value
                places = []
                for place in match["places"].split("|"):
                    start, length, rest = place.split(";")
                    at = layout.copy(int(start), int(length))
                    blobs.append(Blob(weight=tensor.name, offset=at, nbytes=int(length)))
                    places.append(f"{at};{length};{rest}")
                entry.value = f"{match['kernel']}|{'|'.join(places)}"
            if not packed and tensor.name not in scales:
                blobs.append(Blob(weight=tensor.name, offset=moved, nbytes=nbytes))
    (folder / _MODEL).write_bytes(saved.SerializeToString())
    for leftover in (_SAVED, f"{_SAVED}.data"):
        (folder / leftover).unlink()
    return Template(folder=folder, blobs=tuple(blobs))


class _Layout:
    """Copies runs of one file to aligned places in another."""

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._end = 0

    def copy(self, offset: int, nbytes: int) -> int:
        start = -(-self._end // PART_ALIGNMENT) * PART_ALIGNMENT
        self._source.seek(offset)
        self._target.seek(start)
        self._target.write(self._source.read(nbytes))
        self._end = start + nbytes
        return start


@dataclass(frozen=True, slots=True)
class SlotSession:
    """A session and the memory that its packed weights are read from, one part for each blob.

    The parts stay valid as long as the session lives. Each is whole pages, the blob at its start.
    """

    session: ort.InferenceSession
    parts: tuple[memoryview, ...]


def open_slot(template: Template, *, options: Callable[[], ort.SessionOptions]) -> SlotSession:
    """A session over memory of its own, which holds what the template was made from.

    Raises RequestError where the system does not let memory be put there.
    """
    path = (template.folder / _DATA).resolve()  # as the system names it in its list of mappings
    before = set(_mappings(path))
    session = ort.InferenceSession(
        str(template.folder / _MODEL), options(), providers=["CPUExecutionProvider"]
    )
    new = [mapping for mapping in _mappings(path) if mapping not in before]
    parts = tuple(_own_memory(blob, new, template) for blob in template.blobs)
    for start, end, _offset in (each for each in _mappings(path) if each not in before):
        # What the blobs were packed from; read for a comparison, and never again.
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
    return SlotSession(session, parts)


def _own_memory(blob: Blob, mappings: list[tuple[int, int, int]], template: Template) -> memoryview:
    size = -(-blob.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    found = [
        start + blob.offset - offset
        for start, end, offset in mappings
        if offset <= blob.offset and blob.offset + blob.nbytes <= offset + end - start
    ]
    if len(found) != 1:
        raise RequestError(
            f"this onnxruntime ({ort.__version__}) does not map its packed weights, so they cannot "
            "be streamed; give the peer more --memory, or share the model with more peers"
        )
    content = template.read(blob)
    libc = _libc()
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(found[0], size, protection, flags, -1, 0) != found[0]:
        raise RequestError("the system does not give memory where weights are to be streamed to")
    libc.madvise(ctypes.c_void_p(found[0]), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    part = memoryview((ctypes.c_char * size).from_address(found[0])).cast("B")
    part[: blob.nbytes] = content.data
    return part


def _mappings(path: Path) -> Iterator[tuple[int, int, int]]:
    """(start, end, offset in the file) of every mapping of the file in this process."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(path):
            start, end = (int(each, 16) for each in fields[0].split("-"))
            yield start, end, int(fields[2], 16)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
