"""How many threads numpy's products of matrices take. Linux only; elsewhere nothing changes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

_SET_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
"""Of OpenBLAS, as numpy's wheels have it, and as systems do."""

_MAPS = Path("/proc/self/maps")


def limit_blas_threads(threads: int) -> None:
    """Of this process, from now on, while it uses numpy.

    OpenBLAS takes one for each core of the machine where nobody says otherwise, and these spin
    while they wait for each other: the cores are not given for that. Another BLAS stays as it is.
    """
    np.ones((1, 1)) @ np.ones((1, 1))  # its library is mapped then
    for library in _loaded("openblas"):
        for name in _SET_THREADS:
            if (set_threads := getattr(library, name, None)) is not None:
                set_threads(ctypes.c_int(threads))
                break


def _loaded(part: str) -> list[ctypes.CDLL]:
    """Libraries of this process with such a name."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    files = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    paths = dict.fromkeys(file for file in files if part in Path(file).name)
    return [ctypes.CDLL(path) for path in paths]
