"""Limits of the control groups that this process is in: memory, and processor time.

A container or a service has limits of its own, which the machine's figures do not show. Every group
on the way up to the root counts, in both versions of the kernel's interface. Linux only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_NO_LIMIT = 1 << 60
"""Bytes: the first version of the interface has no word for it, and writes a number like that."""


def memory_left_bytes(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process may still take before a group is full; None where nothing limits it.

    Pages of files count as free: the kernel drops them before it refuses memory, and a peer that
    has just written its shards would otherwise have nothing left to hold them in.
    """
    left: list[int] = []
    for group in _groups("memory", root, membership):
        limits = [_integer(group / name) for name in ("memory.max", "memory.high")]
        limits.append(_integer(group / "memory.limit_in_bytes"))
        limit = min((limit for limit in limits if limit is not None), default=_NO_LIMIT)
        if limit >= _NO_LIMIT:
            continue  # what it holds need not be read, which the kernel takes long to add up
        usage = _integer(group / "memory.current")
        if usage is None:
            usage = _integer(group / "memory.usage_in_bytes")
        if usage is not None:
            left.append(max(0, limit - max(0, usage - _file_pages_bytes(group))))
    return min(left, default=None)


def processors(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Processors whose time this process may take; None where nothing limits it."""
    quotas: list[float] = []
    for group in _groups("cpu", root, membership):
        words = _text(group / "cpu.max").split()
        if len(words) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_text(group / name).strip() for name in names]
        if all(word.isdecimal() and int(word) for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's groups that have this controller, innermost first.

    In a container the kernel may name a path that only the host can see: the groups of it that
    exist here, the root at least, are those that hold for us.
    """
    for line in _text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            homes = [root, root / "unified"]
        elif controller in controllers.split(","):
            homes = [root / controllers, root / controller]
        else:
            continue
        home = next((home for home in homes if home.is_dir()), None)
        parts = Path(path.lstrip("/")).parts
        if home is None or ".." in parts:
            continue
        for length in range(len(parts), -1, -1):
            group = home.joinpath(*parts[:length])
            if group.is_dir():
                yield group


def _file_pages_bytes(group: Path) -> int:
    """Pages of files, of the group and of those below it.

    Also those that were used a moment ago: most are this process's own libraries, of which another
    process may have paid for as many on another day.
    """
    counts = dict(
        line.split() for line in _text(group / "memory.stat").splitlines() if len(line.split()) == 2
    )
    total = 0
    for name in ("inactive_file", "active_file"):
        count = counts.get(f"total_{name}", counts.get(name, "0"))
        total += int(count) if count.isdecimal() else 0
    return total


def _integer(path: Path) -> int | None:
    found = _text(path).strip()
    return int(found) if found.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
