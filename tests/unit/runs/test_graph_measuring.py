"""What is made of the times of nodes, and of the way to a peer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx
from edge.graphs.onnx_file import OnnxFile
from edge.progress import ignore_progress
from edge.protocol.part_runs import RUNS_AT_ONCE
from edge.runs.graphs import measuring
from edge.runs.graphs.remote_part import RemotePart
from tests.support.passing_time import let_pass
from tests.support.small_graphs import branches, cnn, written

RUNS = 7
PEER: Any = object()


def times_of(file: OnnxFile, timed: list[Any]) -> list[float]:
    atoms = Atoms(file)
    seconds = [0.0] * len(atoms)
    measuring._add_times(file, atoms, range(len(atoms)), timed, seconds, "attic")
    return seconds


def test_pauses_in_other_nodes_each_time_are_part_of_a_run(tmp_path: Path) -> None:
    """A device that gets half of a core: nodes take 100 us, and each run has a pause of 1 ms."""
    file = open_onnx(written(branches(), tmp_path))
    count = len(file.nodes)
    timed: list[Any] = [
        [f"edge{index}node", 1100 if (run * 5 + 1) % count == index else 100, []]
        for run in range(RUNS)
        for index in range(count)
    ]
    seconds = times_of(file, timed)
    assert sum(seconds) == pytest.approx(count * 1e-4 + 1e-3)
    steady = times_of(file, [[name, 100, told] for name, _micros, told in timed])
    for paused, each in zip(seconds, steady, strict=True):
        assert paused / sum(seconds) == pytest.approx(each / sum(steady))


def test_a_pause_in_one_run_is_none_of_the_others(tmp_path: Path) -> None:
    file = open_onnx(written(branches(), tmp_path))
    timed: list[Any] = [
        [f"edge{index}node", 9000 if run == 3 else 100, []]
        for run in range(RUNS)
        for index in range(len(file.nodes))
    ]
    assert sum(times_of(file, timed)) == pytest.approx(len(file.nodes) * 1e-4)


def test_convolutions_in_blocks_are_known_by_their_tensors(tmp_path: Path) -> None:
    """ONNX Runtime names them so; their times were those of the atom before."""
    file = open_onnx(written(cnn(), tmp_path))
    atoms = Atoms(file)
    convs = [index for index, node in enumerate(file.nodes) if node.op_type == "Conv"]
    others = [index for index in range(len(file.nodes)) if index not in convs]
    timed = [
        [f"{file.nodes[index].output[0]}_nchwc", 1000, []]
        if index in convs
        else [f"edge{index}node", 1, []]
        for _run in range(RUNS)
        for index in range(len(file.nodes))
    ]
    seconds = times_of(file, timed)
    for number, atom in enumerate(atoms):
        own = [index in convs for index in atom.nodes]
        assert seconds[number] == pytest.approx(1e-3 * sum(own) + 1e-6 * own.count(False))
    assert sum(seconds) == pytest.approx(1e-3 * len(convs) + 1e-6 * len(others))


def test_nodes_that_are_not_in_every_run_count_by_their_median() -> None:
    assert measuring._whole_run_s([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [4.0]]) == 3.0 + 4.0
    assert measuring._whole_run_s([]) == 0.0


class Echo:
    """A part that takes so long for each input; `way_s` of it passes for several at once."""

    def __init__(self, way_s: float, computed_s: float) -> None:
        self._way_s, self._own_s = way_s, computed_s
        self._under_way = 0
        self.computed_s: list[float] = []

    async def run(self, inputs: Any) -> None:
        nbytes = inputs["x"].nbytes
        computed_s = self._own_s + 1e-9 * nbytes
        self._under_way += 1
        await asyncio.sleep(0)  # others may begin
        share = min(self._under_way, RUNS_AT_ONCE)
        self._under_way -= 1
        let_pass(max(self._way_s / share, computed_s if share > 1 else self._way_s + computed_s))
        self.computed_s.append(computed_s)

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(
    ("way_s", "computed_s", "overhead_s", "runs"),
    [(0.03, 0.001, 0.001, 50), (0.0005, 0.002, 0.002, 50), (2.0, 0.001, 0.001, 36)],
)
def test_what_a_run_takes_of_a_peer_is_without_the_way(
    way_s: float, computed_s: float, overhead_s: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fewer runs are enough where each takes long."""
    echo = Echo(way_s, computed_s)

    async def opened(*_given: Any, **_terms: Any) -> Any:
        return echo

    monkeypatch.setattr(RemotePart, "open", opened)
    way = asyncio.run(measuring.measure_way(PEER, ignore_progress))
    assert way.latency_s == pytest.approx(way_s + computed_s, rel=0.1)
    assert way.overhead_s == pytest.approx(overhead_s, rel=0.2)
    assert way.handling_s_per_byte == pytest.approx(0.5e-9, rel=0.1)
    assert len(echo.computed_s) == runs
