"""The GPUs of this process, by CUDA's driver, because importing torch takes seconds."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import MutableMapping

from edge.errors import RequestError

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@functools.cache
def num_cuda_devices() -> int:
    """The number of GPUs that this process may use; 0 without a driver."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return 0
    return count.value


def use_only(gpu: int, environment: MutableMapping[str, str]) -> None:
    """Hide all but one GPU from this process. environment: this process's. Call it before CUDA is
    used.

    The number is nvidia-smi's, or counts from 0 in CUDA_VISIBLE_DEVICES. So the driver, PyTorch,
    Triton and NCCL agree. Raises RequestError if that variable names fewer.
    """
    named = environment.get(_VISIBLE)
    if named is None:
        environment[_VISIBLE] = str(gpu)
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
        return
    names = [name.strip() for name in named.split(",") if name.strip()]
    if gpu >= len(names):
        raise RequestError(
            f"there is no GPU {gpu} here: {_VISIBLE} names {len(names)}, counted from 0",
            remedy="take another --gpu, or start without that variable",
        )
    environment[_VISIBLE] = names[gpu]
