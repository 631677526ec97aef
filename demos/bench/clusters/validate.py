"""Do emulated devices have the cores, the rate and the distance that they are said to have?

python -m demos.bench.clusters.validate

Shares of a core by how fast one thread decodes the small model that ships with Edge, beside a whole
core in the same minute; networks by messages of the size of a sum, and by a bulk.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import edge
from demos.bench.clusters.bed import emulate, why_not
from demos.bench.clusters.networks import Network, open_network
from demos.bench.clusters.table import MBIT, Device
from demos.bench.clusters.wire import enter
from demos.bundled import MODEL

SHARES = (1.0, 0.75, 0.5, 0.25)
ROUNDS = 3
REPLIES = 4
MESSAGE_BYTES = 8 << 10
MESSAGES = 200
BULK_S = 0.5
"""How long the bulk should take."""
MOST_BULK_BYTES = 64 << 20

NETWORKS: tuple[tuple[float | None, float], ...] = (
    (None, 0.0),
    (1000 * MBIT, 0.0),
    (100 * MBIT, 0.0),
    (10 * MBIT, 0.0),
    (None, 0.001),
    (None, 0.005),
    (100 * MBIT, 0.001),
)
"""(bytes per second, seconds one way)."""


def decode_rates(cache: Path) -> dict[float, float]:
    """Tokens per second of one thread by share of a core; the shares take turns."""
    found: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(ROUNDS):
        for share in SHARES:
            with (
                emulate([Device(name="a", cores=share)], cache) as addresses,
                edge.Cluster.connect(addresses) as cluster,
            ):
                model = cluster.load(MODEL, context_tokens=256, progress=False)
                for _ in range(REPLIES):
                    reply = model.generate([1, 2], max_new_tokens=254, ignore_eos=True)
                    found[share].append(reply.tokens_per_s)
    return {share: statistics.median(rates) for share, rates in found.items()}


@contextlib.contextmanager
def connection(network: Network) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection from device 0 to device 1."""

    def listen() -> socket.socket:
        enter(network.namespace(1))
        return socket.create_server((network.data_address(1), 0))

    def dial() -> socket.socket:
        enter(network.namespace(0))
        return socket.create_connection(server.getsockname())

    with (
        _in_a_thread(listen) as server,
        _in_a_thread(dial) as source,
        server.accept()[0] as target,
    ):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield source, target


def _in_a_thread(work: Callable[[], socket.socket]) -> socket.socket:
    """In one of its own: a thread stays in the namespace that it enters."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def message_times(source: socket.socket, target: socket.socket) -> list[float]:
    """Seconds from before a message of the size of a sum is sent until it is there."""
    message, times = bytes(MESSAGE_BYTES), []
    for _ in range(MESSAGES):
        start = time.perf_counter()
        source.sendall(message)
        _receive(target, MESSAGE_BYTES)
        times.append(time.perf_counter() - start)
    return times


def bulk_rate(source: socket.socket, target: socket.socket, size: int) -> float:
    """Bytes per second, once the first have arrived."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(source.sendall, bytes(size))
        first = _receive(target, 1)
        start = time.perf_counter()
        _receive(target, size - first)
        took_s = time.perf_counter() - start
        sending.result()
    return size / took_s


def _receive(target: socket.socket, size: int) -> int:
    """At least one byte, and `size` in all."""
    received, space = 0, bytearray(1 << 16)
    while received < size:
        received += target.recv_into(space, min(len(space), size - received))
    return received


def main() -> None:
    """Print what was wanted and what was got."""
    reason = why_not()
    if reason is not None:
        sys.exit(f"clusters cannot be emulated here: {reason}")
    print(f"{'network':<28}{'8 KiB p20':>11}{'p50':>9}{'p80':>9}{'wanted':>9}{'bulk':>14}")
    for rate, delay_s in NETWORKS:
        devices = [
            Device(name=name, cores=1, bytes_per_s=rate, delay_s=delay_s / 2) for name in "ab"
        ]
        with open_network(devices, os.getpid()) as network, connection(network) as ends:
            times = message_times(*ends)
            size = MOST_BULK_BYTES if rate is None else min(MOST_BULK_BYTES, int(rate * BULK_S))
            bulk = bulk_rate(*ends, size)
        p20, p50, p80 = (1e3 * float(value) for value in np.percentile(times, [20, 50, 80]))
        wanted = 1e3 * (delay_s + (MESSAGE_BYTES / rate if rate else 0))
        name = f"{_rate(rate)}, {1e3 * delay_s:g} ms"
        print(
            f"{name:<28}{p20:>8.3f} ms{p50:>9.3f}{p80:>9.3f}{wanted:>9.3f}{bulk / MBIT:>9.1f} Mbit"
        )
    with tempfile.TemporaryDirectory() as cache:
        rates = decode_rates(Path(cache))
    print(f"\n{'share of a core':<28}{'tok/s':>9}{'share got':>12}")
    for share, rate in rates.items():
        print(f"{share:<28g}{rate:>9.1f}{rate / rates[1.0]:>12.2f}")


def _rate(bytes_per_s: float | None) -> str:
    return "unlimited" if bytes_per_s is None else f"{bytes_per_s / MBIT:g} Mbit/s"


if __name__ == "__main__":
    main()
