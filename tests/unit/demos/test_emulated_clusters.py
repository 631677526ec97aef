"""The table of emulated clusters, and the arithmetic that makes devices slow and networks long."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from demos.bench.clusters.control_groups import ControlGroup
from demos.bench.clusters.networks import Network, helper
from demos.bench.clusters.slow_peer import (
    FEWEST_RUNS,
    MOST_BEHIND_S,
    MOST_REMEMBERED,
    MOST_RUNS,
    TRIALS,
    Mode,
    NoSums,
    Usual,
    due_s,
    try_first,
)
from demos.bench.clusters.table import (
    CLUSTERS,
    CORES,
    MBIT,
    QUICK,
    TURNS,
    Device,
    EmulatedCluster,
    cores_of,
)
from demos.bench.clusters.wire import Port, arrival_s
from demos.bench.shapes import CONTEXT_TOKENS, SHAPES
from edge.backends.ort.program import OrtProgram
from transport import SoloCollective


def test_the_table_has_what_it_is_for() -> None:
    names = [cluster.name for cluster in CLUSTERS]
    assert len(set(names)) == len(names) >= 22
    assert {len(cluster.devices) for cluster in CLUSTERS} == {1, 2, 3, 4, 5}
    assert {cluster.shape for cluster in CLUSTERS} == {"H", "W"}
    assert len({cluster.work for cluster in CLUSTERS}) == 2
    assert set(QUICK) <= set(names)
    assert sum(cluster.shares for cluster in CLUSTERS) == 2


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_a_cluster_fits_the_machine_and_its_model(cluster: EmulatedCluster) -> None:

    names = [device.name for device in cluster.devices]
    assert len(set(names)) == len(names)
    assert cluster.shape in SHAPES
    assert cluster.work.prompt_tokens + cluster.work.output_tokens <= CONTEXT_TOKENS
    cores = cores_of(cluster.devices, num_cores=CORES)
    assert set().union(*cores) <= {*range(CORES)}
    assert len(set(cores)) == (len(cores) if len(cores) <= CORES else 1)
    if cluster.everything:
        assert 2 <= len(cluster.devices) <= 3
    if cluster.shares:
        assert len(cluster.devices) > 1


def test_devices_get_cores_of_their_own_or_share_all() -> None:
    devices = [
        Device(name=name, cores=cores) for name, cores in (("a", 0.1), ("b", 0.2), ("c", 0.2))
    ]
    assert cores_of(devices[:2], num_cores=2) == [(0,), (1,)]
    assert cores_of(devices, num_cores=2) == [(0, 1)] * 3
    assert cores_of(devices[:2], num_cores=1) == [(0,)] * 2


def test_devices_that_are_too_many_are_refused() -> None:
    devices = [Device(name=name, cores=TURNS / 3 + 0.01) for name in "abc"]
    with pytest.raises(ValueError, match=r"3 devices with 0\.53 cores take turns"):
        cores_of(devices, num_cores=2)
    assert cores_of([Device(name="a", cores=1)], num_cores=2) == [(0,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": 0}, "a has 0 cores"),
        ({"cores": 1.5}, "a has 1.5 cores"),
        ({"cores": 1, "bytes_per_s": 0}, "the rate of a"),
        ({"cores": 1, "delay_s": -1}, "the delay of a"),
    ],
)
def test_devices_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device(name="a", **options)


def test_a_device_says_what_it_is() -> None:
    device = Device(name="a", cores=0.5, bytes_per_s=100 * MBIT, delay_s=0.0005)
    assert device.words == "a 0.5 core 4 GiB 100 Mbit/s 0.5 ms"
    assert Device(name="b", cores=1).words == "b 1 core 4 GiB"


class TestWire:
    """Seconds are small whole numbers here."""

    def test_a_packet_takes_its_bytes_and_its_way(self) -> None:
        source = Port(bytes_per_s=10, delay_s=1)
        target = Port(bytes_per_s=100, delay_s=2)
        assert arrival_s(source, target, 20, now_s=5) == 5 + 2 + 3

    def test_the_slower_end_decides(self) -> None:
        fast, slow = Port(bytes_per_s=float("inf"), delay_s=0), Port(bytes_per_s=10, delay_s=0)
        slow.receives_until_s = 1.0
        assert arrival_s(fast, slow, 20, now_s=1) == 3

    def test_packets_queue_where_they_leave_and_where_they_arrive(self) -> None:
        a, b, c = (Port(bytes_per_s=10, delay_s=1) for _ in range(3))
        assert arrival_s(a, c, 10, now_s=0) == 3
        assert arrival_s(a, b, 10, now_s=0) == 4  # a was busy for 1 s
        assert arrival_s(b, c, 10, now_s=0) == 4  # c was busy until 3

    def test_both_ways_at_once_do_not_meet(self) -> None:
        a, b = (Port(bytes_per_s=10, delay_s=1) for _ in range(2))
        assert arrival_s(a, b, 10, now_s=0) == arrival_s(b, a, 10, now_s=0) == 3


def test_what_disturbs_some_runs_or_one_lucky_run_is_not_usual(tmp_path: Path) -> None:
    usual = Usual(tmp_path)
    assert usual.s("a graph", 0.5) == 0.5, "nobody tried"
    for seconds in (0.009, 0.002, 0.010, 0.011, 0.001, 0.002, 0.003, 0.009):
        usual.add("a graph", seconds)
    assert usual.s("a graph", 1.0) == 0.002
    assert usual.s("another", 0.5) == 0.5
    for _ in range(MOST_RUNS):
        usual.add("a graph", 0.02)
    assert usual.s("a graph", 1.0) == 0.02
    for _ in range(MOST_RUNS):
        usual.s("a graph", 0.01)
    assert usual.s("a graph", 1.0) == 0.01, "all trials were slow"


def test_a_device_is_as_fast_as_those_before_it(tmp_path: Path) -> None:
    """The machine may be slower, while it lives."""

    def live(seconds: float) -> float:
        usual = Usual(tmp_path)
        for _ in range(2 * FEWEST_RUNS):
            usual.add("a graph", seconds)
        return usual.s("a graph", 1.0)

    assert live(0.002) == 0.002
    assert live(0.003) == 0.002
    assert live(0.004) == 0.002
    assert live(0.001) == 0.001
    assert Usual(tmp_path).s("another", 0.5) == 0.5
    for _ in range(200):
        live(0.003)
    (file,) = tmp_path.iterdir()
    remembered = json.loads(file.read_text())
    assert len(remembered) <= MOST_REMEMBERED
    assert remembered == sorted(remembered)
    assert 0.003 in remembered


class Program:
    """As a shard's, but its step only notes what it finds."""

    def __init__(self) -> None:
        self._hidden = (np.zeros(4), np.ones(4))
        self._partial = (np.zeros(4), np.zeros(4))
        self._graphs = object()
        self.steps: list[tuple[float, bool]] = []


def step(program: Program, shapes: object, collective: Any) -> None:
    array = program._hidden[0]
    program.steps.append((float(array[0]), isinstance(collective, NoSums)))
    array += 1
    collective.all_reduce(array)


def test_a_step_of_new_shapes_is_tried_first_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrtProgram, "_run", step)
    mode, program = Mode(), Program()
    with (tmp_path / "turns").open("ab", buffering=0) as turn:
        try_first(turn, mode, has_own_core=True)
        run: Any = OrtProgram._run
        token = [SimpleNamespace(batch=1, tokens=1, rows=1)]
        for _ in range(2):
            run(program, token, SoloCollective())
        assert program.steps == [
            *((float(number), True) for number in range(TRIALS)),
            (0.0, False),
            (1.0, False),
        ]
        assert not mode.is_trial
        mode.is_measuring = True
        run(program, [SimpleNamespace(batch=2, tokens=1, rows=1)], SoloCollective())
        assert len(program.steps) == TRIALS + 3, "nobody else computes while it measures"


def test_a_core_is_kept_awake_until_nobody_asks_for_it() -> None:
    (core, *_) = sorted(os.sched_getaffinity(0))
    with helper("demos.bench.clusters.awake", str(core)) as process:
        assert process.poll() is None
    assert process.returncode == 0


def test_a_slow_run_ends_when_a_slower_core_would_have_ended_it() -> None:
    assert due_s(10.0, 0.002, share=0.25, behind_s=0.0) == pytest.approx(10.008)
    assert due_s(10.0, 0.002, share=0.25, behind_s=0.0001) == pytest.approx(10.0079)
    assert due_s(10.0, 0.002, share=0.25, behind_s=9.0) == pytest.approx(10.008 - MOST_BEHIND_S)


def test_no_two_beds_share_names_or_addresses() -> None:
    here, there = Network(4711), Network(4712)
    for index in range(8):
        assert here.namespace(index) != there.namespace(index)
        assert not set(here.control_addresses(index)) & set(there.control_addresses(index))
    assert len(Network(4_194_304).coordinator_interface(7)) <= 15


def test_a_group_that_cannot_be_made_says_so() -> None:
    with pytest.raises(OSError, match="no/such"):
        ControlGroup("no/such/parent", memory_bytes=1 << 30)
