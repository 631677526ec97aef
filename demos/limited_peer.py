"""One `edge peer` with limited memory, and its use by its own account and the system's.

Where control groups can be made (root), the system itself ends a daemon that takes more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

import edge
from edge.demos.control_groups import ControlGroup
from edge.demos.processes import child, daemon_address, peak_bytes

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
        """The most it ever was; 0 once it has ended."""
        return peak_bytes(self.process.pid)

    @property
    def bytes_read(self) -> int:
        """From disks, by its own count; 0 once it has ended."""
        try:
            return int(self.process.io_counters().read_bytes)
        except psutil.Error:
            return 0

    def stated_bytes(self) -> int:
        """Its memory without weights and KV caches, by its own account."""
        with edge.Cluster.connect([self.address]) as cluster:
            (peer,) = cluster.peers
        return peer.floor_bytes + sum(model.buffer_bytes for model in peer.models)

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
    program: str = "edge",
    kv_disk: str | None = None,
) -> Iterator[LimitedPeer]:
    """Ends with the block. `memory_bytes` is what it is told, `group` what the system enforces;
    `program` a module that is called as `edge` is; `kv_disk` a folder and its limit.

    Raises OSError if it does not start; its own message is on standard error.
    """
    command = [sys.executable, "-m", program, "peer", "--supervised", "--listen", "127.0.0.1:0"]
    command += ["--name", name]
    if memory_bytes is not None:
        command += ["--memory", str(memory_bytes)]
    if threads is not None:
        command += ["--threads", str(threads)]
    if kv_disk is not None:
        command += ["--kv-disk", kv_disk]
    with child(command if group is None else group.joined(*command), cache=cache) as process:
        address = daemon_address(process, name)
        yield LimitedPeer(address=address, process=psutil.Process(process.pid))
