"""The registry of back ends.

Each is a folder of this package with `backend.py`, imported only when it is opened. Planning knows
its name from `edge.protocol.peer_info`.
"""

from __future__ import annotations

import importlib
from typing import Any

from edge.backends.interface import Backend
from edge.errors import RequestError
from edge.host.cuda_driver import num_cuda_devices
from edge.protocol.peer_info import BACKENDS


def usual_backend() -> str:
    """The default back end: the GPU if it can be used, else the CPU."""
    if not num_cuda_devices():
        return "ort"
    backend = _opened("triton", threads=1)
    return "ort" if backend.why_not() is not None or backend.is_stand_in else "triton"


def open_backend(name: str, *, threads: int) -> Backend:
    """The back end of this name. Raises RequestError if it is unknown or cannot run here."""
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise RequestError(f"back end {name!r} is not one of {known}", remedy=f"one of {known}")
    backend = _opened(name, threads=threads)
    reason = backend.why_not()
    if reason is not None:
        raise RequestError(f"back end {name} cannot run here: {reason}")
    return backend


def _opened(name: str, *, threads: int) -> Backend:
    module: Any = importlib.import_module(f"edge.backends.{name}.backend")
    backend: Backend = module.open_backend(threads=threads)
    return backend
