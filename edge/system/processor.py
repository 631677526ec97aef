"""What the system says of the processor."""

import functools
import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_MOST_BYTES = 1 << 20

_NAMES = ("model name", "CPU implementer", "CPU part", "Model", "Hardware", "cpu model")
"""The fields that name a processor, in the kernels of different ones."""

_FLAGS = ("flags", "Features")


@functools.cache
def _lines() -> tuple[str, ...]:
    try:
        with _CPU_INFO.open("rb") as file:
            return tuple(file.read(_MOST_BYTES).decode(errors="replace").splitlines())
    except OSError:  # other systems have no such file
        return ()


@functools.cache
def processor_names() -> tuple[str, ...]:
    """The distinct lines that name processors: a phone's chip has several kinds."""
    found = {line for line in _lines() if line.split(":")[0].strip() in _NAMES}
    other = platform.processor() or platform.machine()
    return tuple(sorted(found)) or ((f"model name: {other}",) if other else ())


@functools.cache
def processor_kinds() -> tuple[str, ...]:
    """The distinct lines with the names of processors and with their instructions."""
    flags = {line for line in _lines() if line.startswith(_FLAGS)}
    return (*processor_names(), *sorted(flags))


@functools.cache
def instructions() -> tuple[str, ...]:
    """The instruction sets and properties that the system names, such as avx2 or hypervisor; empty
    where it names none."""
    for line in _lines():
        if line.startswith(_FLAGS):
            return tuple(line.partition(":")[2].split())
    return ()
