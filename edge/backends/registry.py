"""The registry of back ends.

Each is a folder of this package with `backend.py`, imported only when it is opened. Planning knows
its name from `edge.protocol.peer_info`.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from edge.backends.interface import Backend
from edge.errors import RequestError
from edge.host.cuda_driver import num_cuda_devices
from edge.host.gpu_adapters import gpu_adapters, has_webgpu_package
from edge.protocol.peer_info import BACKENDS


class _Timed(Backend, Protocol):
    """A back end whose device may be one of several of this host."""

    def decode_seconds(self) -> float:
        """Seconds of the products of a made-up token (`edge.backends.onnx.speed`)."""
        ...


def usual_backend(*, threads: int) -> tuple[str, str]:
    """The default back end, and a sentence about a graphics adapter that was measured ("" without
    one): CUDA's GPU if it can be used, else the faster one of a graphics adapter and the CPU."""
    if num_cuda_devices():
        backend = _opened("triton", threads=threads)
        if backend.why_not() is None and not backend.is_stand_in:
            return "triton", ""
    if not has_webgpu_package() or not gpu_adapters():
        return "ort", ""
    adapter = _opened("webgpu", threads=threads)
    if adapter.why_not() is not None:
        return "ort", ""
    processor = cast("_Timed", _opened("ort", threads=threads))
    ratio = processor.decode_seconds() / cast("_Timed", adapter).decode_seconds()
    is_used = ratio > 1
    return "webgpu" if is_used else "ort", (
        f"the graphics adapter ({adapter.device_name}) computes {ratio:.2g} times as fast as this "
        f"device's processor, and is {'used' if is_used else 'not used'}"
    )


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
