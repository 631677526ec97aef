"""One `edge peer` whose memory is limited, and what it takes: by its own account and the system's.

Where control groups can be made (root), the system itself ends a daemon that takes more.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from demos.bench.clusters.control_groups import ControlGroup
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.huge_pages import with_huge_pages

END_TIMEOUT_S = 15.0

KERNEL_BYTES = 16 << 20
"""What the kernel takes for a daemon counts in its group, too: tables of pages, sockets, pipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedPeer:
    """A daemon that runs."""

    address: str
    process: psutil.Process

    @property
    def resident_bytes(self) -> int:
        """Now; 0 once it has ended."""
        try:
            return int(self.process.memory_info().rss)
        except psutil.Error:
            return 0

    @property
    def peak_bytes(self) -> int:
        """The most it ever was, or since `reset_peak`; 0 once it has ended."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return 0
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak) << 10

    def reset_peak(self) -> None:
        """From now on `peak_bytes` is the most since now. Linux only."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5", encoding="utf-8")

    @property
    def bytes_read(self) -> int:
        """From disks, by its own count; 0 once it has ended."""
        try:
            return int(self.process.io_counters().read_bytes)
        except psutil.Error:
            return 0

    def streamed_file(self) -> Path:
        """The file of packed weights that it reads. Raises LookupError if it streams none."""
        for file in self.process.open_files():
            path = Path(file.path)
            if path.name == "weights" and path.parent.parent.name == "packed":
                return path
        raise LookupError("this daemon streams no weights")


@contextlib.contextmanager
def limited_peer(
    *,
    cache: Path,
    memory_bytes: int | None = None,
    threads: int | None = None,
    name: str = "limited",
    group: ControlGroup | None = None,
) -> Iterator[LimitedPeer]:
    """Ends with the block. `memory_bytes` is what it is told, `group` what the system enforces.

    Raises OSError if it does not start; its own message is on standard error.
    """
    command = [sys.executable, "-m", "edge", "peer", "--supervised", "--listen", "127.0.0.1:0"]
    command += ["--name", name]
    if memory_bytes is not None:
        command += ["--memory", str(memory_bytes)]
    if threads is not None:
        command += ["--threads", str(threads)]
    process = subprocess.Popen(
        command if group is None else group.joined(*command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**with_huge_pages(os.environ), CACHE_VARIABLE: str(cache)},
        start_new_session=True,  # Ctrl-C is for us, who end it in our time
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise OSError(f"the daemon {name} did not start")
            yield LimitedPeer(
                address=json.loads(line)["addresses"][0], process=psutil.Process(process.pid)
            )
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
