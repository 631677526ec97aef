"""Pinned peers that run: daemons on cores, in namespaces and control groups, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from demos.bench.clusters.control_groups import ControlGroup, remove_groups_of_the_dead
from demos.bench.clusters.networks import (
    DATA,
    PREFIX,
    Network,
    open_network,
)
from demos.bench.clusters.table import CORES, Device
from demos.bench.clusters.wire import NAMESPACES
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.huge_pages import with_huge_pages

BESIDE_MODEL_BYTES = 768 << 20
"""What a daemon may hold beside what it offers: Python, ONNX Runtime, and graphs while they are
made. Less, and Linux ends it while it loads."""

_GROUP_BYTES = 128 << 20
"""Of that, what is left to the group beside the daemon: its page tables, and pages of files."""

CACHE_LIMIT = "16GiB"
"""Of the daemons together: every plan cuts other shards out of a model."""

END_TIMEOUT_S = 15.0
_TOOLS = ("ip", "nsenter", "taskset")


def why_not() -> str | None:
    """Why there can be no such peers here, or None if there probably can."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, for namespaces and control groups"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    owner = os.getpid()
    try:
        ControlGroup(f"{PREFIX}-{owner}-try", memory_bytes=1 << 30).close()
        with open_network([Device(name="a", core=0, delay_s=0.001)], owner):
            return None
    except subprocess.CalledProcessError as error:
        return f"the system refuses: {str(error.stderr).strip() or error}"
    except OSError as error:
        return f"the system refuses: {error}"


@contextlib.contextmanager
def open_bed(devices: Sequence[Device], cache: Path) -> Iterator[tuple[str, ...]]:
    """The addresses of these devices' daemons, which share the cache; all is gone afterwards.

    Raises ValueError for a core that this machine has not, OSError or CalledProcessError where the
    system does not allow it, TimeoutError for a daemon that stays.
    """
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    missing = [each.name for each in devices if each.core >= len(cores)]
    if missing:
        raise ValueError(f"{', '.join(missing)}: this machine has {len(cores)} cores")
    remove_leftovers()
    owner = os.getpid()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(open_network(devices, owner))
        groups = [
            stack.enter_context(
                contextlib.closing(
                    ControlGroup(
                        network.namespace(index),
                        memory_bytes=device.memory_bytes + BESIDE_MODEL_BYTES,
                        quota=device.quota if device.quota < 1 else None,
                    )
                )
            )
            for index, device in enumerate(devices)
        ]
        daemons = [
            stack.enter_context(
                _daemon(device, network, groups[index], index, cores[device.core], cache)
            )
            for index, device in enumerate(devices)
        ]
        yield tuple(daemon.address() for daemon in daemons)


def remove_leftovers() -> None:
    """What beds of processes that have died left behind: their daemons, groups and namespaces."""
    remove_groups_of_the_dead(PREFIX)
    for namespace in NAMESPACES.glob(f"{PREFIX}-*"):
        if _is_dead(namespace.name):
            subprocess.run(["ip", "netns", "delete", namespace.name], check=True)


def _is_dead(name: str) -> bool:
    owner = name.split("-")[1]
    return owner.isdecimal() and not Path(f"/proc/{owner}").exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Daemon:
    device: Device
    process: subprocess.Popen[str]
    host: str

    def address(self) -> str:
        """Where the coordinator reaches it. Raises OSError if it did not start."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise OSError(f"the daemon of {self.device.name} did not start")
        port = json.loads(line)["addresses"][0].rpartition(":")[2]
        return f"{self.host}:{port}"


@contextlib.contextmanager
def _daemon(
    device: Device,
    network: Network,
    group: ControlGroup,
    index: int,
    core: int,
    cache: Path,
) -> Iterator[_Daemon]:
    """`edge peer` on its core, in its group and its namespace. Ends when its input does."""
    command = group.joined(
        *("nsenter", f"--net={network.file(index)}", "taskset", "--cpu-list", str(core)),
        *(sys.executable, "-m", "edge", "peer"),
        *("--supervised", "--listen", "0.0.0.0:0", "--interface", DATA),
        *("--name", device.name, "--threads", "1"),
        *("--memory", str(device.memory_bytes + BESIDE_MODEL_BYTES - _GROUP_BYTES)),
        *("--model-memory", str(device.memory_bytes), "--cache-limit", CACHE_LIMIT),
    )
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**with_huge_pages(os.environ), CACHE_VARIABLE: str(cache)},
        start_new_session=True,  # Ctrl-C is for us, who end it in our time
    )
    with process:
        try:
            yield _Daemon(device=device, process=process, host=network.control_addresses(index)[1])
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
