"""A graph for which one device has not the memory: on two, and both keep their promises."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

import edge
from edge.backends.onnx.runtime import ort
from edge.protocol.graph_frames import PACKED, PROCESS_BYTES
from edge.runs.graphs.measured_peers import HELD_BYTES, LEAST_BUFFER_BYTES
from tests.support.processes import Daemon, start_together
from tests.support.slow_cases import shown_in_parts
from tests.support.small_graphs import FLOAT, Arrays, Builder, agree, written

pytestmark = pytest.mark.usefixtures("begun_anew")

WIDTH, LAYERS, INPUTS = 1024, 24, 6
WEIGHT_BYTES = 4 * LAYERS * WIDTH * WIDTH
ROOM_BYTES = PACKED * WEIGHT_BYTES * 11 // 20
"""Memory of a daemon for weights and tensors of one part: a little more than for half of them."""


class Watched:
    """The most that each daemon and the processes of its parts have in memory at once."""

    def __init__(self, daemons: Sequence[Daemon]) -> None:
        self._processes = [psutil.Process(each.process.pid) for each in daemons]
        self.peaks_bytes = [0] * len(daemons)
        self.most_processes = 0
        self._is_over = threading.Event()

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            for number, daemon in enumerate(self._processes):
                held, count = 0, 0
                for process in (daemon, *daemon.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        held += process.memory_info().rss
                        count += 1
                self.peaks_bytes[number] = max(self.peaks_bytes[number], held)
                self.most_processes = max(self.most_processes, count)

    def __enter__(self) -> Watched:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


_BESIDE_BYTES = LEAST_BUFFER_BYTES + HELD_BYTES + (4 << 20)
"""What is reserved for each part as well, with a little more for what differs by run."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Products with matrices in a file beside the graph."""
    b, x = Builder(), "x"
    for number in range(LAYERS):
        x = b.add("MatMul", x, b.weight(WIDTH, WIDTH, scale=WIDTH**-0.5))
        x = b.add("Tanh", x, out="y" if number == LAYERS - 1 else None)
    return written(b.model({"x": (FLOAT, ["n", WIDTH])}, {"y": FLOAT}), tmp_path, external=True)


@pytest.fixture
def expected(large: Path) -> list[Arrays]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(large), options, providers=["CPUExecutionProvider"])
    return [{"y": session.run(None, {"x": x})[0]} for x in inputs()]


def inputs() -> Iterator[np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    for seed in range(INPUTS):
        yield np.random.default_rng(seed).normal(0, 1, (2, WIDTH)).astype(np.float32)


@pytest.mark.linux_ways
@shown_in_parts("unit/runs/test_graphs.py", "multiprocess/test_memory_promise.py")
def test_a_graph_of_twice_a_devices_memory_runs_on_two_within_their_promises(
    large: Path, expected: list[Arrays], tmp_path: Path
) -> None:
    with Daemon(tmp_path / "floor", "--no-announce") as daemon:
        promise_bytes = daemon.describe().floor_bytes + PROCESS_BYTES + _BESIDE_BYTES + ROOM_BYTES
    options = ("--no-announce", "--memory", str(promise_bytes))
    starts = [
        partial(Daemon, tmp_path / name, "--name", name, *options) for name in ("attic", "cellar")
    ]
    with (
        start_together(*starts) as daemons,
        edge.Cluster.connect([each.address for each in daemons]) as cluster,
        Watched(daemons) as watched,
    ):
        first = next(inputs())
        with cluster.load_graph(large, sample={"x": first}) as graph:
            assert graph.alone is None
            assert len(graph.plan.devices) == 2
            room = [each.memory_bytes for each in graph._graph.facts.devices]
            assert 1.7 * max(room) < PACKED * WEIGHT_BYTES
            agree(graph.run({"x": first}), expected[0])
            stream = graph.stream({"x": x} for x in inputs())
            for found, wanted in zip(stream, expected, strict=True):
                assert isinstance(found, dict)
                agree(found, wanted)
        for daemon in daemons:
            daemon.await_free()
            assert daemon.messages == ""
    assert watched.most_processes == 2
    assert max(watched.peaks_bytes) <= promise_bytes
