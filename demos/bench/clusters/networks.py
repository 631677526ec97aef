"""Networks of namespaces: one for each device, joined by a bridge of the kernel or by `wire`.

Every device has two interfaces: `data` to the other devices, as fast as its cluster says, and
`control` to the coordinator, which nothing slows: shipping weights is not what is measured. Control
networks are cables of two ends, so that one device cannot reach another that way.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge.demos.bench.clusters.table import Device
from edge.demos.bench.clusters.wire import MTU, NAMESPACES
from edge.demos.processes import child

PREFIX = "edgebed"
DATA = "data0"
CONTROL = "control0"
_MOST_DEVICES = 8
_CONTROL_NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
"""Set aside for benchmarks (RFC 2544): nobody's addresses are hidden."""
_DATA_NETWORK = ipaddress.IPv4Network("10.0.0.0/24")
"""Inside the namespaces only."""


class Network:
    """The namespaces of one bed and what joins them. Made by `open_network`."""

    def __init__(self, owner: int) -> None:
        self.owner = owner

    def namespace(self, index: int) -> str:
        return f"{PREFIX}-{self.owner}-{index}"

    def file(self, index: int) -> Path:
        """For `nsenter --net`."""
        return NAMESPACES / self.namespace(index)

    def coordinator_interface(self, index: int) -> str:
        """At most 15 characters, as Linux wants it: ids of processes have at most 7."""
        return f"eb{self.owner}c{index}"

    def control_addresses(self, index: int) -> tuple[str, str]:
        """Addresses of the coordinator and of the device, on the cable between them."""
        number = self.owner % (_CONTROL_NETWORK.num_addresses // 4 // _MOST_DEVICES)
        first = _CONTROL_NETWORK[4 * (number * _MOST_DEVICES + index)]
        return str(first + 1), str(first + 2)

    def data_address(self, index: int) -> str:
        return str(_DATA_NETWORK[index + 1])


@contextlib.contextmanager
def open_network(devices: Sequence[Device], owner: int) -> Iterator[Network]:
    """A namespace for each device, `owner` in its name; nothing of it is left afterwards.

    Raises OSError or CalledProcessError where the system does not allow it.
    """
    if len(devices) > _MOST_DEVICES:
        raise ValueError(f"{len(devices)} devices are too many; {_MOST_DEVICES} at most")
    network = Network(owner)
    with contextlib.ExitStack() as stack:
        for index in range(len(devices)):
            namespace = network.namespace(index)
            stack.enter_context(_namespace(namespace))
            ours, its = network.control_addresses(index)
            here = network.coordinator_interface(index)
            stack.callback(remove_interface, here)
            _ip(
                f"link add {here} type veth peer name {CONTROL} netns {namespace}",
                f"address add {ours}/30 dev {here}",
                f"link set {here} up",
            )
            _ip(
                "link set lo up",
                f"address add {its}/30 dev {CONTROL}",
                f"link set {CONTROL} up",
                namespace=namespace,
            )
        if all(each.bytes_per_s is None and not each.delay_s for each in devices):
            stack.enter_context(_bridge(network, len(devices)))
        else:
            stack.enter_context(_wire(network, devices))
        for index in range(len(devices)):
            address = f"{network.data_address(index)}/{_DATA_NETWORK.prefixlen}"
            _ip(
                f"address add {address} dev {DATA}",
                f"link set {DATA} up",
                namespace=network.namespace(index),
            )
        yield network


@contextlib.contextmanager
def _bridge(network: Network, count: int) -> Iterator[None]:
    """A switch of the kernel, in a namespace of its own, with a cable to every device."""
    switch = f"{PREFIX}-{network.owner}-switch"
    with _namespace(switch):
        cables = [
            command
            for index in range(count)
            for command in (
                f"link add port{index} type veth peer name {DATA} netns {network.namespace(index)}",
                f"link set port{index} master bridge0 up",
            )
        ]
        _ip("link add bridge0 type bridge", "link set bridge0 up", *cables, namespace=switch)
        yield


@contextlib.contextmanager
def _wire(network: Network, devices: Sequence[Device]) -> Iterator[None]:
    ports = [
        {
            "namespace": network.namespace(index),
            "interface": DATA,
            "address": network.data_address(index),
            "bytes_per_s": device.bytes_per_s,
            "delay_s": device.delay_s,
        }
        for index, device in enumerate(devices)
    ]
    command = [sys.executable, "-m", "edge.demos.bench.clusters.wire", json.dumps(ports)]
    with child(command) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise OSError("the wire did not start; its own message, on standard error, says why")
        for index in range(len(devices)):
            _ip(f"link set {DATA} mtu {MTU}", namespace=network.namespace(index))
        yield


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def remove_interface(name: str) -> None:
    """It may have gone already, with the namespace of its other end."""
    if os.path.exists(f"/sys/class/net/{name}"):  # noqa: PTH110 - a link; what it leads to is nothing
        subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


def _ip(*commands: str, namespace: str | None = None) -> None:
    """Several commands of `ip` at once, in a namespace."""
    where = [] if namespace is None else ["-netns", namespace]
    subprocess.run(
        ["ip", *where, "-batch", "-"],
        input="\n".join(commands),
        check=True,
        capture_output=True,
        text=True,
    )
