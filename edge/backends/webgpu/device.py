"""The graphics adapter: its sessions, and memory on it.

ONNX Runtime has one adapter for each process, and its provider is not made for several threads. So
one lock guards every session and every copy of the process.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.process import prepare_process
from edge.backends.onnx.runtime import ort
from edge.errors import RequestError

PACKAGE = "onnxruntime_ep_webgpu"
_PROVIDER = "WebGpuExecutionProvider"
_NAME = "webgpu"

_lock = threading.RLock()
_is_registered = False


class Device:
    """The adapter that WebGPU chose. Arrays on it are `OrtValue`s."""

    lock = _lock

    def __init__(self, threads: int) -> None:
        """Raises RequestError if there is no adapter."""
        prepare_process(threads)
        self._ep_device = _ep_device()
        self.name = "WebGPU adapter"

    @property
    def identity(self) -> str:
        """The version of all that decides the bits of keys and values."""
        return f"{self._ep_device.ep_metadata.get('version', '')} {self.name}"

    def session_options(self) -> ort.SessionOptions:
        """Options of a session on the adapter."""
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 4
        options.add_provider_for_devices([self._ep_device], {})
        return options

    def session(self, model: bytes) -> ort.InferenceSession:
        """A session whose nodes run on the adapter; those that it lacks run on the CPU."""
        with _lock:
            return ort.InferenceSession(model, self.session_options())

    def put(self, array: NDArray[Any]) -> ort.OrtValue:
        """A copy of the array on the adapter."""
        with _lock:
            return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), _NAME, 0)

    def empty(self, shape: Sequence[int], dtype: type[np.generic]) -> ort.OrtValue:
        """An array on the adapter, not initialised."""
        with _lock:
            return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, _NAME, 0)

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Copy an array to another one on the adapter."""
        with _lock:
            ort.copy_tensors([source], [target])

    def write(self, target: ort.OrtValue, array: NDArray[Any]) -> None:
        """Overwrite an array on the adapter."""
        with _lock:
            target.update_inplace(np.ascontiguousarray(array))

    def read(self, value: ort.OrtValue) -> NDArray[Any]:
        """A copy of an array of the adapter."""
        with _lock:
            found: NDArray[Any] = value.numpy()
            return found


def why_no_package() -> str | None:
    """Why the provider cannot be loaded, in one sentence with the remedy; None if it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} cannot be imported; pip install edge-inference[webgpu] on this device"
    return None


def _ep_device() -> Any:
    """ONNX Runtime's device for WebGPU. Raises RequestError if there is none."""
    global _is_registered  # noqa: PLW0603 - mirrors state that onnxruntime keeps globally
    with _lock:
        if not _is_registered:
            missing = why_no_package()
            if missing is not None:
                raise RequestError(missing)
            if os.environ.get(ALLOW_SOFTWARE) == "1":
                os.environ[_ALLOW_SOFTWARE_OF_PROVIDER] = "1"
            package = importlib.import_module(PACKAGE)
            ort.register_execution_provider_library(_NAME, package.get_library_path())
            _is_registered = True
        for each in ort.get_ep_devices():
            if each.ep_name == _PROVIDER:
                return each
    raise RequestError("WebGPU finds no graphics adapter")


ALLOW_SOFTWARE = "EDGE_ALLOW_SOFTWARE_ADAPTER"
"""Environment variable: 1 lets an adapter in software compute, which is for tests."""

_ALLOW_SOFTWARE_OF_PROVIDER = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
