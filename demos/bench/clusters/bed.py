"""Pinned peers that run: daemons on cores, in namespaces and control groups, and their end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edge.demos.bench.clusters.networks import DATA, PREFIX, open_network
from edge.demos.bench.clusters.table import CORES, Device
from edge.demos.bench.clusters.wire import NAMESPACES, inside
from edge.demos.control_groups import ControlGroup, remove_groups_of_the_dead
from edge.demos.processes import child, daemon_address

OVERHEAD_BYTES = 768 << 20
"""What a daemon may hold as well as what it offers: Python, ONNX Runtime, and graphs while they are
made. Less, and Linux ends it while it loads."""

_GROUP_BYTES = 128 << 20
"""The part of that which the daemon leaves to the group: its page tables, and pages of files."""

CACHE_LIMIT = "16GiB"
"""Limit of the cache that the daemons share: every plan cuts other shards out of a model."""

_COORDINATOR = Device(name="coordinator", core=0)
"""A namespace of its own; no daemon runs there."""

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


class Bed(NamedTuple):
    """Daemons that run, in the order of their devices."""

    addresses: tuple[str, ...]
    groups: tuple[ControlGroup, ...]


@contextlib.contextmanager
def open_bed(
    devices: Sequence[Device], cache: Path, *, is_coordinator_apart: bool = False
) -> Iterator[Bed]:
    """These devices' daemons, which share the cache; all is gone afterwards.

    is_coordinator_apart: meanwhile this thread, and those that it starts, reach the devices by
    their networks, as a device without a limit of its own would.

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
        apart = (_COORDINATOR,) if is_coordinator_apart else ()
        network = stack.enter_context(open_network((*devices, *apart), owner))
        daemons, groups = [], []
        for index, device in enumerate(devices):
            group = ControlGroup(
                network.namespace(index),
                memory_bytes=device.memory_bytes + OVERHEAD_BYTES,
                quota=device.quota if device.quota < 1 else None,
            )
            groups.append(stack.enter_context(group))
            command = group.joined(
                *("nsenter", f"--net={network.file(index)}"),
                *("taskset", "--cpu-list", str(cores[device.core])),
                *(sys.executable, "-m", "edge", "peer"),
                *("--supervised", "--listen", "0.0.0.0:0", "--interface", DATA),
                *("--name", device.name, "--threads", "1"),
                *("--memory", str(device.memory_bytes + OVERHEAD_BYTES - _GROUP_BYTES)),
                *("--model-memory", str(device.memory_bytes), "--cache-limit", CACHE_LIMIT),
            )
            daemons.append(stack.enter_context(child(command, cache=cache)))
        addresses = []
        for index, (device, daemon) in enumerate(zip(devices, daemons, strict=True)):
            port = daemon_address(daemon, device.name).rpartition(":")[2]
            control = network.control_addresses(index)[1]
            host = network.data_address(index) if is_coordinator_apart else control
            addresses.append(f"{host}:{port}")
        if is_coordinator_apart:
            stack.enter_context(inside(network.namespace(len(devices))))
        yield Bed(tuple(addresses), tuple(groups))


def remove_leftovers() -> None:
    """What beds of processes that have died left behind: their daemons, groups and namespaces."""
    remove_groups_of_the_dead(PREFIX)
    for namespace in NAMESPACES.glob(f"{PREFIX}-*"):
        if _is_dead(namespace.name):
            subprocess.run(["ip", "netns", "delete", namespace.name], check=True)


def _is_dead(name: str) -> bool:
    owner = name.split("-")[1]
    return owner.isdecimal() and not Path(f"/proc/{owner}").exists()
