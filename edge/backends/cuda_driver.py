"""Whether this machine has a GPU for CUDA, asked of the driver: importing torch takes seconds."""

from __future__ import annotations

import ctypes
import functools

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0


@functools.cache
def num_cuda_devices() -> int:
    """GPUs that this process may use; 0 without a driver."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return 0
    return count.value
