"""Control groups of Linux, in either version: limits and counts of a device's resources."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
PARENTS = (ROOT, ROOT / "memory", ROOT / "blkio", ROOT / "cpu")
PERIOD_US = 20_000
"""Period of a quota, in µs: steps must be long against it."""
BLOCKS = Path("/sys/dev/block")
END_TIMEOUT_S = 10.0

_ANY_RATE = 1 << 40
"""Bytes per second; more than any disk gives."""

_JOIN = """
while [ "$1" != -- ]; do echo $$ > "$1" || exit; shift; done
shift
exec "$@"
"""


class ControlGroup(contextlib.AbstractContextManager["ControlGroup"]):
    """A group of processes with limited memory; `close` ends what still runs in it, removes it."""

    def __init__(
        self,
        name: str,
        *,
        memory_bytes: int,
        disk: Path | None = None,
        read_bytes_per_s: int | None = None,
        quota: float | None = None,
    ) -> None:
        """With any file of a disk, counts what is read from that, and limits its rate.

        quota: how much of one core its processes get in each period.

        Raises OSError where control groups cannot be made.
        """
        self._is_v2 = (ROOT / "cgroup.controllers").exists()
        parents = [ROOT if self._is_v2 else ROOT / "memory"]
        if disk is not None and not self._is_v2:
            parents.append(ROOT / "blkio")
        self._disk_folder = parents[-1] / name
        if quota is not None and not self._is_v2:
            parents.append(ROOT / "cpu")
        self._folders = [parent / name for parent in parents]
        self._device = None if disk is None else _device(disk)
        try:
            for folder in self._folders:
                folder.mkdir()
            limit = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
            (self._folders[0] / limit).write_text(str(memory_bytes))
            if disk is not None and not self._is_v2:
                # The kernel counts what groups read from a disk once it has had a limit.
                throttle = self._disk_folder / "blkio.throttle.read_bps_device"
                for any_rate in (_ANY_RATE, 0):
                    throttle.write_text(f"{self._device} {any_rate}")
            if read_bytes_per_s is not None:
                rate = f"rbps={read_bytes_per_s}" if self._is_v2 else str(read_bytes_per_s)
                limit = "io.max" if self._is_v2 else "blkio.throttle.read_bps_device"
                (self._disk_folder / limit).write_text(f"{self._device} {rate}")
            if quota is not None:
                self.limit_processor(quota)
        except BaseException:
            self.close()
            raise

    def limit_processor(self, quota: float) -> None:
        """Change the quota of a group that has one."""
        folder, quota_us = self._folders[-1], round(quota * PERIOD_US)
        if self._is_v2:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            return
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def joined(self, *command: str) -> list[str]:
        """The command that puts itself into the group and becomes this one."""
        files = [str(folder / "cgroup.procs") for folder in self._folders]
        return ["sh", "-c", _JOIN, "sh", *files, "--", *command]

    @property
    def bytes_read(self) -> int:
        """From the disk, by all of its processes; pages that were in memory do not count."""
        folder = self._disk_folder
        if self._is_v2:
            for line in (folder / "io.stat").read_text().splitlines():
                device, *counts = line.split()
                if device == self._device:
                    return int(dict(each.split("=") for each in counts)["rbytes"])
            return 0
        for line in (folder / "blkio.throttle.io_service_bytes").read_text().splitlines():
            if line.startswith(f"{self._device} Read "):
                return int(line.split()[2])
        return 0

    def close(self) -> None:
        """May be called again."""
        for folder in self._folders:
            remove_group(folder)

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _device(path: Path) -> str:
    """The whole disk that the file is on, as major:minor."""
    if sys.platform != "linux":
        raise OSError("control groups are Linux's")
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    place = (BLOCKS / device).resolve()
    if (place / "partition").exists():
        return (place.parent / "dev").read_text().strip()
    return device


def remove_groups_of_the_dead(prefix: str) -> None:
    """Groups named `prefix`-PROCESS-… of processes that did not end their groups themselves."""
    for folder in [each for parent in PARENTS for each in parent.glob(f"{prefix}-*")]:
        owner = folder.name.removeprefix(f"{prefix}-").split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            remove_group(folder)


def remove_group(folder: Path) -> None:
    """End every process of the group and remove it. Raises TimeoutError if one does not go."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while folder.exists():
        for process in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(process)).kill()
        try:
            folder.rmdir()
        except OSError as error:  # busy until the last of its processes is gone
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{folder} cannot be removed: {error}") from error
            time.sleep(0.01)
