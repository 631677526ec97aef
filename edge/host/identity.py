"""The identity of this machine, and of the hardware and software that determine its speed."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import socket
import uuid
from importlib import metadata
from pathlib import Path

import psutil

from edge.host import block_kernels
from edge.host.cgroup import processors
from edge.kernels.matmul_blocks.reference import OPERATOR_VERSION
from edge.system.processes import allowed_cores
from edge.system.processor import processor_kinds, processor_names

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


_COMPUTING = {
    "ort": ("onnxruntime", block_kernels.DISTRIBUTION),
    "triton": ("torch", "triton"),
    "webgpu": ("onnxruntime", "onnxruntime-ep-webgpu"),
}
"""The packages of each back end that affect its speed."""


@functools.cache
def host_id() -> str:
    """The id of this machine, equal in all its processes and containers, which share its memory.

    It is a hash of the boot id, which stays private, and changes at the next boot.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = f"{uuid.getnode():x} {socket.gethostname()}"
    return hashlib.sha256(f"edge host {boot}".encode()).hexdigest()[:16]


def device_identity(*, backend: str, accelerator: str, threads: int, sample_bytes: int) -> str:
    """A hash that changes when a device must be measured anew.

    It covers processor, accelerator, threads, power (a laptop is slower on its battery), versions
    of the software that computes, and `sample_bytes`, the size of the measured sample of a model,
    which is smaller with little memory.
    """
    facts = {
        "processor": list(processor_names()),
        "machine": platform.machine(),
        "affinity": allowed_cores(),
        "quota": processors(),
        "memory": psutil.virtual_memory().total,
        "battery": on_battery(),
        "versions": _versions(backend),
        "backend": backend,
        "accelerator": accelerator,
        "threads": threads,
        "sample_bytes": sample_bytes,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def arithmetic_identity(*, backend: str, accelerator: str) -> str:
    """A hash that is equal for devices whose results have the same bits.

    It covers processor, accelerator, and versions of the software that computes. Kernels differ
    between processors, by their instructions: some round the inputs of products, some do not.
    """
    facts = {
        "processor": list(processor_kinds()),
        "machine": platform.machine(),
        "versions": _versions(backend),
        "backend": backend,
        "accelerator": accelerator,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def on_battery() -> bool:
    """Whether the device runs on its battery now; False where the system does not tell."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, AttributeError):  # a container without /sys, or a system without the call
        return False
    return battery is not None and battery.power_plugged is False


@functools.cache
def _versions(backend: str) -> dict[str, str]:
    found = {}
    for name in ("edge-inference", "numpy", *_COMPUTING.get(backend, ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    if block_kernels.DISTRIBUTION in found:  # which may be there and not be used
        is_used = block_kernels.library() is not None
        found[block_kernels.DISTRIBUTION] = f"{OPERATOR_VERSION}" if is_used else ""
    return found
