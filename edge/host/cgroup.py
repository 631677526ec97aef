"""Limits of this process's control groups: memory and CPU time. Linux only.

Containers and services have limits that the machine's figures do not show. Every group up to the
root counts, in both versions of the kernel's interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge.system.processes import allowed_cores

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_NO_LIMIT = 1 << 60
"""Bytes that mean no limit: version 1 of the interface writes such a number."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MemoryGroup:
    """A control group with a limit of memory."""

    left_bytes: int
    """Bytes that its processes may still allocate."""
    number: int
    """Its inode: the same in all processes of the machine."""


def memory_left_bytes(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process may still allocate; None: no limit."""
    group = tightest_group(root=root, membership=membership)
    return None if group is None else group.left_bytes


def tightest_group(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> MemoryGroup | None:
    """The group of this process with the least memory left; None: no limit.

    The page cache counts as free: the kernel drops it before it refuses memory. Otherwise a peer
    that has just written its shards would have no memory for them.
    """
    found: list[MemoryGroup] = []
    for group in _groups("memory", root, membership):
        limits = [_integer(group / name) for name in ("memory.max", "memory.high")]
        limits.append(_integer(group / "memory.limit_in_bytes"))
        limit = min((limit for limit in limits if limit is not None), default=_NO_LIMIT)
        if limit >= _NO_LIMIT:
            continue  # its usage need not be read, which is slow
        usage = _integer(group / "memory.current")
        if usage is None:
            usage = _integer(group / "memory.usage_in_bytes")
        if usage is not None:
            left_bytes = max(0, limit - max(0, usage - _file_pages_bytes(group)))
            found.append(MemoryGroup(left_bytes=left_bytes, number=group.stat().st_ino))
    return min(found, default=None)


def processors(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """The number of processors' worth of time for this process; None: no limit."""
    quotas: list[float] = []
    for group in _groups("cpu", root, membership):
        words = _text(group / "cpu.max").split()
        if len(words) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_text(group / name).strip() for name in names]
        if all(word.isdecimal() and int(word) for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cores(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Whole cores for the threads of this process: those that it may run on, as far as the control
    group leaves their time. More threads would wait for each other."""
    quota = processors(root=root, membership=membership)
    cores = len(allowed_cores())
    return cores if quota is None else max(1, min(cores, int(quota)))


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's groups with this controller, innermost first.

    In a container the kernel may name a path that only the host can see. The groups that exist
    here, at least the root, apply.
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
    """The page cache of the group and of those below it.

    Recently used pages are included: most are this process's libraries, which might as well be
    charged to another process.
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
