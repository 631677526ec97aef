"""A switch and its cables in user space: every device has a rate and a distance, and none is lost.

Each device's namespace gets a TUN interface whose packets end here. A packet leaves its device at
the device's rate, after those sent before it, takes its way, and arrives at the other device's
rate, after those that came before it. Linux's own rate limiter (tbf) lets bursts through at once,
and a sum of 8 KiB after each graph is all bursts.

python -m edge.demos.bench.clusters.wire JSON     ends with its standard input
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
MTU = 65_000
"""One packet for most messages: the switch is cheap, and rates are exact to a packet."""


@dataclass(slots=True, kw_only=True)
class Port:
    """One device's cable, and until when it is busy each way; times in seconds of one clock."""

    bytes_per_s: float
    delay_s: float
    """From the device to the switch, or back."""
    sends_until_s: float = 0.0
    receives_until_s: float = 0.0


def arrival_s(source: Port, target: Port, size: int, now_s: float) -> float:
    """When the last byte of a packet is at its target, which is busy with it until then."""
    begins_s = max(now_s, source.sends_until_s)
    source.sends_until_s = begins_s + size / source.bytes_per_s
    way_s = source.delay_s + target.delay_s
    target.receives_until_s = max(
        source.sends_until_s + way_s,
        max(begins_s + way_s, target.receives_until_s) + size / target.bytes_per_s,
    )
    return target.receives_until_s


def enter(namespace: str) -> None:
    """Have this thread open its sockets and interfaces in a namespace from now on."""
    with (NAMESPACES / namespace).open() as file:
        _enter(file.fileno())


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, open their sockets in a namespace."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter(namespace)
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def open_tun(interface: str) -> int:
    """The file of a new interface. Raises OSError where it cannot be made."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(tun, _TUNSETIFF, request)
    return tun


def relay(ports: dict[int, Port], addresses: dict[bytes, int], until_end: int) -> None:
    """Carry packets between the interfaces (by file) until `until_end` is readable."""
    under_way: list[tuple[float, int, int, bytes]] = []
    watched = [*ports, until_end]
    clock, count = time.perf_counter, 0
    while True:
        pause_s = max(0.0, under_way[0][0] - clock()) if under_way else None
        ready, _, _ = select.select(watched, (), (), pause_s)
        if until_end in ready:
            return
        for file in ready:
            packet = os.read(file, MTU)
            target = addresses.get(packet[16:20])  # of IPv4; anything else is nobody's
            if target is not None:
                count += 1
                due_s = arrival_s(ports[file], ports[target], len(packet), clock())
                heapq.heappush(under_way, (due_s, count, target, packet))
        while under_way and under_way[0][0] <= clock():
            _due_s, _count, target, packet = heapq.heappop(under_way)
            os.write(target, packet)


def main() -> None:
    """Make the interfaces, say so, carry packets. The argument is a list, one entry a device."""
    ports: dict[int, Port] = {}
    addresses: dict[bytes, int] = {}
    for each in json.loads(sys.argv[1]):
        enter(each["namespace"])
        tun = open_tun(each["interface"])
        ports[tun] = Port(bytes_per_s=each["bytes_per_s"] or float("inf"), delay_s=each["delay_s"])
        addresses[socket.inet_aton(each["address"])] = tun
    # Before everything else on the machine, and with timers that are not rounded.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    print("ready", flush=True)
    relay(ports, addresses, sys.stdin.fileno())


if __name__ == "__main__":
    main()
