"""The graphics adapter: its sessions, and memory on it.

ONNX Runtime has one adapter for each process, and its provider is not made for several threads. So
one lock guards every session and every copy of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.process import prepare_process
from edge.backends.onnx.runtime import new_session_options, ort
from edge.backends.webgpu.attention_probe import attends_rightly
from edge.backends.webgpu.errors import AFTER_A_FAILURE, ErrorLog
from edge.errors import CapacityError, DeviceLostError, EdgeError, RequestError
from edge.host.free_memory import format_size
from edge.host.gpu_adapters import (
    WEBGPU_PACKAGE,
    allows_software,
    gpu_adapters,
    why_no_adapter,
)
from edge.kernels.onnx_graph import WEBGPU, WEBGPU_BY_NODES, Provider

_PROVIDER = "WebGpuExecutionProvider"
_NAME = "webgpu"

_TOO_LARGE_BYTES = 1 << 50

_MEASURED_BYTES = 64 << 20
_MEASURED_COPIES = 4

_lock = threading.RLock()
_errors = ErrorLog()
_errors_are_seen = False
_long_steps: Provider | None = None
_is_registered = False


class Device:
    """The adapter that WebGPU chose. Arrays on it are `OrtValue`s.

    Every method raises CapacityError if the adapter has no memory left, and DeviceLostError for
    other errors of it.
    """

    def __init__(self, threads: int) -> None:
        """Raises RequestError if there is no adapter, or if its errors cannot be seen."""
        prepare_process(threads)
        self._ep_device = _ep_device()
        adapters = gpu_adapters(allow_software=allows_software())
        self.adapter = adapters[0] if adapters else None
        """The adapter's facts, as far as the system tells them."""
        self.name = "unknown"
        if self.adapter is not None:
            self.name = f"{self.adapter.name}, {self.adapter.driver}"
        self.is_lost = False
        """Set after an error of the adapter: it has to be opened anew."""
        self._check_errors_are_seen()
        self.long_steps = _provider_of_long_steps(self)
        """The provider of steps of LONG_STEP tokens and more."""

    @property
    def identity(self) -> str:
        """The versions of all that decides the bits of keys and values."""
        return f"{self._ep_device.ep_metadata.get('version', '')} {self.name}"

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Context of every use of the adapter, and of the end of what lies there. Errors of ONNX
        Runtime, which are plain exceptions, are those of the adapter."""
        with _lock:
            try:
                with _errors.watched(self.name):
                    yield
            except (EdgeError, OSError):  # OSError: of a file
                raise
            except Exception as error:
                raise DeviceLostError(
                    f"the graphics adapter ({self.name}) failed: {error}", remedy=AFTER_A_FAILURE
                ) from error

    def session(self, model: bytes, *, captures: bool = False) -> ort.InferenceSession:
        """A session whose nodes run on the adapter; those that it lacks run on the CPU.

        captures: the first run of a binding is recorded, and later ones are submitted as a whole.
        Raises an error of ONNX Runtime if not all nodes can be recorded.
        """
        options = new_session_options()
        options.enable_mem_pattern = not captures
        chosen = {"enableGraphCapture": "1"} if captures else {}
        options.add_provider_for_devices([self._ep_device], chosen)
        with _lock, _errors.watched(self.name):
            return ort.InferenceSession(model, options)

    def copy_bytes_per_s(self) -> float:
        """The best rate of a few copies to the adapter."""
        sample, best_s = np.zeros(_MEASURED_BYTES, np.uint8), math.inf
        with self.used():
            for _ in range(_MEASURED_COPIES):
                start_s = time.perf_counter()
                self.put(sample)
                best_s = min(best_s, time.perf_counter() - start_s)
        return _MEASURED_BYTES / best_s

    def put(self, array: NDArray[Any]) -> ort.OrtValue:
        """A copy of the array on the adapter."""
        self._check_size(array.nbytes)
        with self.used():
            return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), _NAME, 0)

    def empty(self, shape: Sequence[int], dtype: type[np.generic]) -> ort.OrtValue:
        """An array on the adapter, not initialised."""
        self._check_size(math.prod(shape) * np.dtype(dtype).itemsize)
        with self.used():
            return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, _NAME, 0)

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy an array to another one on the adapter."""
        with self.used():
            ort.copy_tensors([source], [target])

    def write(self, target: ort.OrtValue, array: NDArray[Any]) -> None:
        """Overwrite an array on the adapter."""
        with self.used():
            target.update_inplace(np.ascontiguousarray(array))

    def read(self, value: ort.OrtValue) -> NDArray[Any]:
        """A copy of an array of the adapter."""
        with self.used():
            found: NDArray[Any] = value.numpy()
            return found

    def _check_size(self, nbytes: int) -> None:
        """Raises CapacityError for an array that is larger than the adapter binds."""
        most = None if self.adapter is None else self.adapter.largest_buffer_bytes
        if most is not None and nbytes > most:
            raise CapacityError(
                f"an array of {format_size(nbytes)} is larger than the graphics adapter "
                f"({self.name}) binds, {format_size(most)}",
                remedy="share the model with more peers, so that each has a part of it",
            )

    def _check_errors_are_seen(self) -> None:
        """Ask for more memory than any adapter has, which must be noticed."""
        global _errors_are_seen  # noqa: PLW0603 - a fact about the process
        if _errors_are_seen:
            return
        try:
            with _lock, _errors.watched(self.name):
                ort.OrtValue.ortvalue_from_shape_and_type([_TOO_LARGE_BYTES], np.uint8, _NAME, 0)
        except (CapacityError, DeviceLostError):
            _errors_are_seen = True
            return
        raise RequestError(
            "errors of the graphics adapter cannot be seen here, and results might be wrong",
            remedy="start the peer with --backend ort",
        )


def _provider_of_long_steps(device: Device) -> Provider:
    """Found out once in the life of the process."""
    global _long_steps  # noqa: PLW0603 - a fact about the process's adapter
    if _long_steps is None:
        is_right = attends_rightly(device.session)
        _long_steps = WEBGPU if is_right else WEBGPU_BY_NODES
    return _long_steps


def _ep_device() -> Any:
    """ONNX Runtime's device for WebGPU. Raises RequestError if there is none."""
    global _is_registered  # noqa: PLW0603 - mirrors state that onnxruntime keeps globally
    with _lock:
        if not _is_registered:
            if allows_software():
                os.environ[_ALLOW_SOFTWARE_OF_PROVIDER] = "1"
            package = importlib.import_module(WEBGPU_PACKAGE)
            ort.register_execution_provider_library(_NAME, package.get_library_path())
            _is_registered = True
        for each in ort.get_ep_devices():
            if each.ep_name == _PROVIDER:
                return each
    raise RequestError(why_no_adapter())


_ALLOW_SOFTWARE_OF_PROVIDER = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
