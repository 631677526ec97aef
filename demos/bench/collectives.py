"""How long is one sum over all ranks, against a raw exchange and torch.distributed's gloo?

python -m edge.demos.bench.collectives --ranks 2 --ranks 4 --ranks 8 --wire float16 --wire int8

Every rank is a process of its own. Ours and gloo take turns within one call; the time is that of
rank 0, for the median of many sums.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import click
import numpy as np
from numpy.typing import NDArray

from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Figures, Metric
from edge.transport import WIRE_FORMATS, Link, TcpLink, WireFormatName, WireRule, open_mesh

ROUNDS = 5
ROUNDED: tuple[WireFormatName, ...] = tuple(name for name in WIRE_FORMATS if name != "float32")
Array = NDArray[np.float32]


def pairs(ranks: int) -> dict[tuple[int, int], socket.socket]:
    """Connected TCP sockets for every ordered pair of ranks."""
    found: dict[tuple[int, int], socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for low in range(ranks):
            for high in range(low + 1, ranks):
                found[low, high] = socket.create_connection(server.getsockname())
                found[high, low], _address = server.accept()
    for each in found.values():
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def run_rank(
    rank: int, ranks: int, sockets: dict[tuple[int, int], socket.socket], port: int,
    with_gloo: bool, orders: Connection,
) -> None:  # fmt: skip
    """Serve orders (kind, bytes, repeats) until None; rank 0's times in µs are sent back."""
    mine = {high: sockets[rank, high] for high in range(ranks) if high != rank}
    raw = mine.get(1 - rank) if ranks == 2 else None
    links: dict[int, Link] = {
        other: TcpLink(each.dup(), f"rank {other}") for other, each in mine.items()
    }
    meshes = {
        "edge" if name == "float32" else name: open_mesh(rank, links, WireRule(format=name))
        for name in WIRE_FORMATS
    }
    gloo = _gloo(rank, ranks, port) if with_gloo else None
    while (order := orders.recv()) is not None:
        kind, nbytes, repeats = order
        array = np.ones(nbytes // 4, np.float32)
        other = np.empty_like(array)

        def exchange(array: Array = array, other: Array = other, nbytes: int = nbytes) -> None:
            assert raw is not None
            raw.sendall(array)  # type: ignore[arg-type]
            view, got = other.view(np.uint8).data, 0
            while got < nbytes:
                got += raw.recv_into(view[got:])
            np.add(array, other, out=other)

        call: Callable[[], None]
        if kind == "raw":
            call = exchange
        elif kind == "gloo":
            assert gloo is not None
            call = gloo(array)
        else:
            call = functools.partial(meshes[kind].all_reduce, array)
        times = []
        for index in range(repeats):
            if index % 8 == 0:
                array.fill(1)  # sums of sums would overflow
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        orders.send(times[repeats // 10 :])
    for mesh in meshes.values():
        mesh.close()


def _gloo(rank: int, ranks: int, port: int) -> Callable[[Array], Callable[[], None]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )

    def prepare(array: Array) -> Callable[[], None]:
        tensor = torch.from_numpy(array)
        return lambda: dist.all_reduce(tensor)

    return prepare


def measure(
    ranks: int,
    sizes: tuple[int, ...],
    repeats: int,
    with_gloo: bool,
    wires: tuple[WireFormatName, ...] = (),
) -> list[Metric]:
    """The median of each round as values, for every size and kind."""
    context = multiprocessing.get_context("fork")
    sockets = pairs(ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(
            target=run_rank, args=(rank, ranks, sockets, port, with_gloo, pipes[rank][1])
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    kinds = ["raw"] * (ranks == 2) + ["edge", *wires] + ["gloo"] * with_gloo
    figures = Figures()
    for _ in range(ROUNDS):
        for size in sizes:
            name, times_us = f"{ranks} ranks, {size >> 10} KiB", {}
            for kind in kinds:
                for pipe, _child in pipes:
                    pipe.send((kind, size, repeats))
                of_rank_0, *_others = [pipe.recv() for pipe, _child in pipes]
                times_us[kind] = float(np.median(of_rank_0))
                figures.add(f"{name}, {kind}", "µs", times_us[kind])
            if ranks == 2:
                figures.add(f"{name}, edge / raw", "ratio", times_us["edge"] / times_us["raw"])
            for kind in kinds[kinds.index("edge") + 1 :]:
                ratio = times_us[kind] / times_us["edge"]
                figures.add(f"{name}, {kind} / edge", "ratio", ratio)
    for pipe, _child in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    for each in sockets.values():
        each.close()
    return figures.metrics()


@click.command()
@click.option("--ranks", "rank_counts", type=click.IntRange(2, 16), multiple=True, default=(2,))
@click.option("--kib", "sizes", type=int, multiple=True, default=(8, 16, 32), show_default=True)
@click.option("--repeats", type=int, default=500, show_default=True)
@click.option(
    "--wire",
    "wires",
    type=click.Choice(ROUNDED),
    multiple=True,
    help="Also with messages in this format; may be repeated.",
)
@append_option
def main(
    rank_counts: tuple[int, ...],
    sizes: tuple[int, ...],
    repeats: int,
    wires: tuple[WireFormatName, ...],
    append: bool,
) -> None:
    """Microseconds of one all-reduce of float32."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with_gloo = importlib.util.find_spec("torch") is not None
    metrics: list[Metric] = []
    for ranks in rank_counts:
        metrics += measure(ranks, tuple(size << 10 for size in sizes), repeats, with_gloo, wires)
    results.publish(
        metrics,
        question="one sum over all ranks",
        variant=f"float32, {repeats} sums a round" + ("" if with_gloo else ", no torch here"),
        link="TCP over loopback",
        model="none",
        keep=append,
    )


if __name__ == "__main__":
    sys.exit(main())
