"""The processor's instructions without which numpy and ONNX Runtime crash at import."""

from __future__ import annotations

import re
from pathlib import Path

from edge.errors import RequestError

_CPU_INFO = Path("/proc/cpuinfo")

_FIRST_PROCESSOR_BYTES = 8192
"""Enough for the first processor's entry; a server may have hundreds, and each takes time."""

_NEEDED = {
    "cx16": "CMPXCHG16B",
    "lahf_lm": "LAHF",
    "pni": "SSE3",
    "popcnt": "POPCNT",
    "sse4_1": "SSE4.1",
    "sse4_2": "SSE4.2",
    "ssse3": "SSSE3",
}
"""By the kernel's name, those of x86-64-v2, which the wheels of numpy are built for. ARM64 needs
none beyond those that each of its processors has."""


def check_instructions(cpu_info: Path = _CPU_INFO) -> None:
    """Raises RequestError with the names of missing instructions. A system that tells nothing of
    its processor passes."""
    try:
        with cpu_info.open("rb") as file:
            text = file.read(_FIRST_PROCESSOR_BYTES).decode(errors="replace")
    except OSError:
        return
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)  # ARM calls them Features
    if flags is None:
        return
    has = flags[1].split()
    missing = [name for flag, name in _NEEDED.items() if flag not in has]
    if missing:
        raise RequestError(
            f"this processor lacks {', '.join(missing)}, which numpy and ONNX Runtime use",
            remedy="use a processor of x86-64-v2 (2009 or later); in a virtual machine, pass on "
            "the host's processor (CPU type host, or host-passthrough)",
        )
