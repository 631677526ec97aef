"""ONNX Runtime's threads, which all sessions of a process share."""

from __future__ import annotations

import threading

from edge.backends.onnx.runtime import ort
from edge.errors import RequestError
from edge.system.heap import keep_allocations_together

_preparing = threading.Lock()
_process_threads: int | None = None


def prepare_process(threads: int) -> None:
    """Make the process's thread pool before its first session. It cannot change.

    Raises RequestError for another number of threads.
    """
    global _process_threads  # noqa: PLW0603 - mirrors state that onnxruntime keeps globally
    with _preparing:
        if _process_threads == threads:
            return
        if _process_threads is not None:
            raise RequestError(
                f"this process already computes with {_process_threads} threads",
                remedy=f"start another process to use {threads}",
            )
        keep_allocations_together()
        ort.set_default_logger_severity(3)
        ort.set_global_thread_pool_sizes(threads, 1)
        _process_threads = threads
