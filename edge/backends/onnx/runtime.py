"""ONNX Runtime without telemetry. All of Edge imports it from here."""

import os

# Otherwise the import writes a device id into the user's home and reports to the vendor. Nothing
# leaves a user's devices unless the user sends it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

__all__ = ["has_windowed_caches", "new_session_options", "ort"]

_FATAL = 4


def has_windowed_caches() -> bool:
    """Whether attention on CPUs may keep the newest tokens only: from version 1.31 on."""
    major, minor = map(int, ort.__version__.split(".")[:2])
    return (major, minor) >= (1, 31)


def new_session_options() -> ort.SessionOptions:
    """Options of a session that computes with the process's threads and writes no log. Its errors
    are raised, and a step that was interrupted inside a branch of a graph is no error of a user."""
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = _FATAL
    return options
