"""The identity of this machine, and of what decides how fast it computes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import socket
import uuid
from importlib import metadata
from pathlib import Path

import psutil

from edge.host.cgroup import processors

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU_INFO = Path("/proc/cpuinfo")

_CPU_FIELDS = ("model name", "CPU implementer", "CPU part", "Model", "Hardware", "cpu model")
"""The names that kernels of different processors use."""


_COMPUTING = {"ort": ("onnxruntime",), "triton": ("torch", "triton")}
"""The packages that compute, by back end."""


@functools.cache
def host_id() -> str:
    """The same for every process on this machine, containers included: they share its memory.

    A hash, because the number of this boot is nobody's business. After the next boot it is another.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = f"{uuid.getnode():x} {socket.gethostname()}"
    return hashlib.sha256(f"edge host {boot}".encode()).hexdigest()[:16]


def device_identity(*, backend: str, accelerator: str, threads: int, sample_bytes: int) -> str:
    """Changes when a device must be measured anew; says nothing else.

    Processor and accelerator, its share of it, power (on its battery a laptop is slower), versions
    of the software that computes, and `sample_bytes`, which it would be measured with: a device
    with little memory is measured with less of a model.
    """
    facts = {
        "processor": _processor(),
        "machine": platform.machine(),
        "affinity": sorted(os.sched_getaffinity(0)),
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


def on_battery() -> bool:
    """Whether the device runs on its battery just now."""
    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False


@functools.cache
def _processor() -> list[str]:
    """The lines that name the processors, each once: a phone's chip has several kinds."""
    try:
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.split(":")[0].strip() in _CPU_FIELDS})


@functools.cache
def _versions(backend: str) -> dict[str, str]:
    found = {}
    for name in ("edge-inference", "numpy", *_COMPUTING.get(backend, ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found
