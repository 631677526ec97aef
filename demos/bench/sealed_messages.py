"""What sealing costs a message: an exchange between two processes, and AES-GCM alone.

python -m edge.demos.bench.sealed_messages

The ways take turns: plain TCP, sealed records over TCP as between two hosts, TLS 1.3 by the
standard `ssl`, which handshakes use and messages do not, and a Unix socket as on one host. Both
ends are on this machine, each on a core of its own where there are two. The time is that of one
end, for the median of many exchanges; `seal and open` is what one end does of it in AES-256-GCM, on
one core with nothing else to do. `cold` is the same after weights have gone through the cache, as
between two sums of a model: then code and keys come from memory, too, and what is opened finds the
code there that has sealed. `nothing, cold` is what of that Python alone takes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

import click
import numpy as np
from numpy.typing import NDArray

from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Figures
from edge.membership.membership import Membership, credentials
from edge.transport import TcpLink
from edge.transport.records import (
    PLAIN,
    SECRET_BYTES,
    Records,
    RecordSecrets,
    SealedRecords,
    as_bytes,
    parts,
)

WAYS = ("TCP", "TCP, sealed", "TCP, TLS", "Unix socket")
ROUNDS = 9
COLD_REPEATS = 100
WEIGHTS_BYTES = 64 << 20
"""Twice the last cache of most machines."""
TLS_RECORD_BYTES = 16 << 10
_SIZE = bytes(8)


class End(Protocol):
    """An end of a link."""

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None: ...

    def close(self) -> None: ...


class TlsEnd:
    """The same over a TLS socket, after its handshake: the size, and what can be moved in either
    direction is. Neither time limits nor threads are looked after, as a link does."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        connected.setblocking(False)
        self._socket = connected

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        first, *others = parts(as_bytes(outgoing), TLS_RECORD_BYTES - len(_SIZE))
        sending = [memoryview(outgoing.nbytes.to_bytes(len(_SIZE)) + first), *others][::-1]
        size = bytearray(len(_SIZE))
        receiving = [memoryview(size), as_bytes(incoming)][::-1]
        while sending or receiving:
            moves = False
            if sending:
                with contextlib.suppress(ssl.SSLWantWriteError):
                    moves = _moved(sending, self._socket.send(sending[-1]))
            if receiving:
                with contextlib.suppress(ssl.SSLWantReadError):
                    moves |= _moved(receiving, self._socket.recv_into(receiving[-1]))
            if not moves:
                os.sched_yield()
        assert int.from_bytes(size) == incoming.nbytes

    def close(self) -> None:
        self._socket.close()


def _moved(buffers: list[memoryview], count: int) -> bool:
    """Take `count` bytes off the last one; what is left of it stays there."""
    rest = buffers.pop()[count:]
    if rest.nbytes:
        buffers.append(rest)
    return True


def tls_ends(connected: tuple[socket.socket, socket.socket]) -> tuple[TlsEnd, TlsEnd]:
    """With the certificates and the settings of Edge's own handshakes."""
    membership = Membership.founded("attic")
    shown = credentials(lambda: membership)
    one, other = (
        context.wrap_socket(
            each,
            server_side=context is shown.listening,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        for context, each in zip((shown.connecting, shown.listening), connected, strict=True)
    )
    answering = threading.Thread(target=other.do_handshake)
    answering.start()
    one.do_handshake()
    answering.join()
    return TlsEnd(one), TlsEnd(other)


def ends(way: str) -> tuple[End, End]:
    """Two ends of a link, for two processes."""
    if way == "Unix socket":
        pair = socket.socketpair()
        for each in pair:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # as `same_host` asks
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            first = socket.create_connection(server.getsockname())
            pair = first, server.accept()[0]
    if way == "TCP, TLS":
        for each in pair:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return tls_ends(pair)
    records: tuple[Records, Records] = (PLAIN, PLAIN)
    if way == "TCP, sealed":
        known = os.urandom(2 * SECRET_BYTES)
        secrets = [RecordSecrets.derived(known, b"", listens=each) for each in (False, True)]
        records = SealedRecords(secrets[0]), SealedRecords(secrets[1])
    one, other = (TcpLink(end, way, records=how) for end, how in zip(pair, records, strict=True))
    return one, other


def exchanges_us(link: End, nbytes: int, repeats: int) -> list[float]:
    """Times of `repeats` exchanges."""
    outgoing = np.random.default_rng(0).integers(256, size=nbytes, dtype=np.uint8)
    incoming = np.empty_like(outgoing)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        link.exchange(outgoing, incoming)
        times.append(1e6 * (time.perf_counter() - start))
    return times


def answer(links: Mapping[str, End], core: int, orders: Connection) -> None:
    """The other end, in a process of its own; (way, bytes, repeats) until None."""
    os.sched_setaffinity(0, {core})
    while (order := orders.recv()) is not None:
        way, nbytes, repeats = order
        exchanges_us(links[way], nbytes, repeats)


def sealed_us(nbytes: int, repeats: int, weights: NDArray[np.uint8] | None = None) -> float:
    """Time to seal a message of `nbytes` bytes and to open one, records as a link has them.

    weights: what is read before each.
    """
    known = os.urandom(2 * SECRET_BYTES)
    one, other = (
        SealedRecords(RecordSecrets.derived(known, b"", listens=each)) for each in (False, True)
    )
    content = as_bytes(np.random.default_rng(0).integers(256, size=nbytes, dtype=np.uint8))
    opened = as_bytes(np.empty(nbytes, np.uint8))
    times = []
    for _ in range(repeats):
        took_s = 0.0
        limit = one.record_bytes(nbytes)
        if weights is not None:
            weights.max()
        for part, into in zip(parts(content, limit), parts(opened, limit), strict=True):
            start = time.perf_counter()
            sealed = one.seal(_SIZE, part)
            took_s += time.perf_counter() - start
            other.space(into)[:] = sealed
            start = time.perf_counter()
            other.open(_SIZE, into)
            took_s += time.perf_counter() - start
        times.append(1e6 * took_s)
    return float(np.median(times))


def nothing_us(repeats: int, weights: NDArray[np.uint8]) -> float:
    """To ask for a view of a few bytes."""
    few, times = np.zeros(8, np.uint8), []
    for _ in range(repeats):
        weights.max()
        start = time.perf_counter()
        as_bytes(few)
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))


def measure(sizes: tuple[int, ...], repeats: int) -> Figures:
    """The median of each round as values."""
    cores = sorted(os.sched_getaffinity(0))
    links = {way: ends(way) for way in WAYS}
    context = multiprocessing.get_context("fork")
    orders, child = context.Pipe()
    theirs = {way: pair[1] for way, pair in links.items()}
    process = context.Process(target=answer, args=(theirs, cores[-1], child))
    process.start()
    found, weights = Figures(), np.ones(WEIGHTS_BYTES, np.uint8)
    os.sched_setaffinity(0, {cores[0]})
    try:
        for _ in range(ROUNDS):
            for nbytes in sizes:
                name, count = f"{nbytes >> 10} KiB", max(10, repeats * 8 // (nbytes >> 10))
                took = {}
                for way in WAYS:
                    orders.send((way, nbytes, count))
                    took[way] = float(np.median(exchanges_us(links[way][0], nbytes, count)))
                    found.add(f"{name}, {way}", "µs", took[way])
                for way in WAYS[1:]:
                    found.add(f"{name}, {way} / TCP", "ratio", took[way] / took["TCP"])
                sealed = took["TCP, TLS"] / took["TCP, sealed"]
                found.add(f"{name}, TLS / sealed", "ratio", sealed)
                found.add(f"{name}, seal and open", "µs", sealed_us(nbytes, count))
                few = min(count, COLD_REPEATS)
                found.add(f"{name}, seal and open, cold", "µs", sealed_us(nbytes, few, weights))
            found.add("nothing, cold", "µs", nothing_us(min(repeats, COLD_REPEATS), weights))
    finally:
        os.sched_setaffinity(0, cores)
        orders.send(None)
        process.join()
        for pair in links.values():
            for link in pair:
                link.close()
    return found


@click.command()
@click.option("--kib", "sizes", type=int, multiple=True, default=(8, 1024), show_default=True)
@click.option(
    "--repeats", type=int, default=2000, show_default=True, help="Of 8 KiB; less of more."
)
@append_option
def main(sizes: tuple[int, ...], repeats: int, append: bool) -> None:
    """Microseconds of one exchange, plain, sealed and on one host."""
    found = measure(tuple(size << 10 for size in sizes), repeats)
    results.publish(
        found.metrics(),
        question="an exchange between two processes",
        variant="each sends and receives so much",
        link="loopback",
        model="none",
        keep=append,
    )


if __name__ == "__main__":
    main()
