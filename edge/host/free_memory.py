"""The memory available to this process, on this machine and in its control group."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from edge.errors import RequestError, shown
from edge.host.cgroup import memory_left_bytes, tightest_group
from edge.host.home import expanded
from edge.host.identity import host_id
from edge.system.processes import peak_memory_bytes, shared_memory_bytes

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
    "t": 10**12, "tb": 10**12,
    "ki": 1 << 10, "kib": 1 << 10, "mi": 1 << 20, "mib": 1 << 20, "gi": 1 << 30, "gib": 1 << 30,
    "ti": 1 << 40, "tib": 1 << 40,
}  # fmt: skip

KEPT_FREE_BYTES = 1 << 30
"""Memory that is left to the device's user."""


def parse_size(text: str | int) -> int:
    """Bytes from "4GiB", "500 MB", "1.5g" or a number. Raises RequestError otherwise."""
    if isinstance(text, int) and not isinstance(text, bool):
        size: float = text
    elif not isinstance(text, str):
        raise RequestError(f"a size is a text like 4GiB or a number of bytes, not {shown(text)}")
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            raise RequestError(
                f"{shown(text)} is not a size", remedy="write 4GiB, 500MB or a number of bytes"
            )
        size = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size < 1 << 60:
        raise RequestError(
            f"a size of {shown(text)} makes no sense", remedy="write 4GiB, 500MB or bytes"
        )
    return int(size)


def parse_folder_and_size(text: str) -> tuple[Path, int]:
    """(folder, bytes) from "/fast/kv:20GiB". Raises RequestError otherwise."""
    folder, colon, size = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon or not folder:
        raise RequestError(
            f"{shown(text)} is not a folder and a size", remedy="write /some/folder:20GiB"
        )
    return expanded(folder), parse_size(size)


def format_size(num_bytes: int) -> str:
    """A size in binary units, such as 1.5 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def usable_memory_bytes(*, reserve: float = 1.0, spare_bytes: int = 0) -> int:
    """The memory that a peer offers by default: the free memory less `spare_bytes` and a reserve
    for the user.

    The reserve is KEPT_FREE_BYTES, but at most half of the free memory. reserve: the part of it
    that is kept.
    """
    free = max(0, free_memory_bytes() - spare_bytes)
    return free - int(reserve * min(KEPT_FREE_BYTES, free - free // 2))


def free_memory_bytes() -> int:
    """The most memory that this process could allocate now."""
    free = int(psutil.virtual_memory().available)
    left = memory_left_bytes()
    return free if left is None else min(free, left)


def memory_pool() -> str:
    """The id of the memory that `free_memory_bytes` is a part of: the machine's or a control
    group's. Processes with equal ids share it."""
    group = tightest_group()
    if group is None or group.left_bytes >= psutil.virtual_memory().available:
        return host_id()
    return f"{host_id()}/{group.number}"


def machine_memory_bytes() -> int:
    """The machine's whole memory, free or not."""
    return int(psutil.virtual_memory().total)


def process_memory() -> dict[str, int]:
    """The memory of this process: `resident_bytes`, `anonymous_bytes` (not backed by files), and
    `peak_bytes`, the maximum of resident ones."""
    now = psutil.Process().memory_info()
    return {
        "resident_bytes": now.rss,
        "anonymous_bytes": now.rss - shared_memory_bytes(now),
        "peak_bytes": peak_memory_bytes(),
    }
