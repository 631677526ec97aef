"""The memory that one emulated device may use: a control group of Linux, in either version."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
END_TIMEOUT_S = 10.0


class ControlGroup:
    """A group of processes with limited memory; `close` ends what still runs in it, removes it."""

    def __init__(self, name: str, *, memory_bytes: int) -> None:
        """Raises OSError where control groups cannot be made."""
        is_v2 = (ROOT / "cgroup.controllers").exists()
        self._folder = (ROOT if is_v2 else ROOT / "memory") / name
        self._folder.mkdir()
        try:
            limit = self._folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")
            limit.write_text(str(memory_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def process_file(self) -> Path:
        """A process that writes its id here is in the group from then on."""
        return self._folder / "cgroup.procs"

    def close(self) -> None:
        """May be called again."""
        remove_group(self._folder)


def remove_group(folder: Path) -> None:
    """End every process of the group and remove it. Raises TimeoutError if one does not go."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while folder.exists():
        for process in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError as error:  # busy until the last of its processes is gone
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{folder} cannot be removed: {error}") from error
            time.sleep(0.01)
