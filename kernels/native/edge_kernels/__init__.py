"""Operators of ONNX Runtime, as a library: products with blocks of GGUF files, and attention."""

from __future__ import annotations

import ctypes
from pathlib import Path

LIBRARY = Path(__file__).with_name("library.bin")


def layout() -> int:
    """The version of the layout of tiles."""
    found: int = ctypes.CDLL(str(LIBRARY)).edge_kernels_layout()
    return found


def operator() -> int:
    """The version of the operator's inputs and types."""
    found: int = ctypes.CDLL(str(LIBRARY)).edge_kernels_operator()
    return found


def kernels() -> str:
    """The name of the kernels that this processor takes, such as "avx2"; "plain": slow ones."""
    name = ctypes.CDLL(str(LIBRARY)).edge_kernels_name
    name.restype = ctypes.c_char_p
    found: bytes = name()
    return found.decode()
