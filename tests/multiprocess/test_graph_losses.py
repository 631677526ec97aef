"""A stream of 1,000 inputs through a graph while daemons are killed, stopped and come back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import edge
from edge.backends.onnx.runtime import ort
from edge.partition import GraphChoice, GraphFacts, GraphPlan, GraphStage, estimate_graph
from edge.protocol.client import PeerClient
from edge.runs.graphs import cut_graph
from tests.support.processes import Daemon, start_together
from tests.support.slow_cases import shown_in_parts
from tests.support.small_graphs import KINDS, agree, cnn, stateful, written

INPUTS = 1000
KILLED_AT, RENEWED_AT, STOPPED_AT, GOES_ON_AT = 200, 350, 500, 800
NAMES = ("attic", "barn", "cellar")
SILENT_AFTER_S = 0.5
"""Silence of the stopped daemon alone; of the others none counts, however busy they are."""
LAYERS = 4


def over_all(facts: GraphFacts, _objective: object) -> GraphChoice:
    """A plan with every device that is left, in the place of the best one."""
    count = len(facts.devices)
    middles = [facts.cuts[len(facts.cuts) * number // count] for number in range(1, count)]
    ends = [0, *middles, len(facts.atoms)]
    stages = tuple(
        GraphStage(device=device.name, atoms=range(start, stop))
        for device, start, stop in zip(facts.devices, ends, ends[1:], strict=False)
    )
    plan = GraphPlan(stages=stages)
    return GraphChoice(plan=plan, estimate=estimate_graph(facts, plan), alone=None)


class Losses:
    """Three daemons; while inputs go through them, one is killed, and another one is stopped."""

    def __init__(self, folder: Path, daemons: list[Daemon]) -> None:
        self._folder = folder
        self.daemons = {each.name: each for each in daemons}
        self.clients: dict[str, list[PeerClient]] = {each.address: [] for each in daemons}
        self.renewed: Daemon | None = None
        self.stopped: Daemon | None = None

    @property
    def addresses(self) -> list[str]:
        return list(self.clients)

    def happen(self, number: int, plan: GraphPlan) -> None:
        """What happens before this input. The last device of the plan is killed, and of those that
        are left the first is stopped."""
        if number == KILLED_AT:
            assert set(plan.devices) == set(NAMES)
            self.daemons.pop(killed := plan.devices[-1]).kill()
            self._killed = killed
        if number == RENEWED_AT:
            assert set(plan.devices) == set(self.daemons)
            self.renewed = self._started(self._killed)
        if number == STOPPED_AT:
            self.stopped = self.daemons.pop(plan.devices[0])
            self.stopped.process.send_signal(signal.SIGSTOP)
            for client in self.clients[self.stopped.address]:
                client._hearing.silent_after_s, client._hearing._at_most_s = SILENT_AFTER_S, None
        if number == GOES_ON_AT:
            assert set(plan.devices) == set(self.daemons)
            self.go_on()

    def go_on(self) -> None:
        if self.stopped is not None:
            self.stopped.process.send_signal(signal.SIGCONT)

    def _started(self, name: str) -> Daemon:
        (address,) = (
            each
            for each in self.addresses
            if each not in [daemon.address for daemon in self.daemons.values()]
        )
        return Daemon(self._folder / name, "--no-announce", "--name", name, listen=address)


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    def started(name: str) -> Daemon:
        return Daemon(tmp_path / name, "--no-announce", "--name", name)

    connect = PeerClient.connect
    with start_together(*(partial(started, name) for name in NAMES)) as daemons:
        found = Losses(tmp_path, daemons)

        async def connected(address: str, *given: Any, **options: Any) -> PeerClient:
            client = await connect(address, *given, **options)
            found.clients[address].append(client)
            return client

        monkeypatch.setattr(PeerClient, "connect", connected)
        monkeypatch.setattr(cut_graph, "choose_graph_plan", over_all)
        try:
            yield found
        finally:
            found.go_on()
            if found.renewed is not None:
                found.renewed.close()


def answers(model: ModelProto) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """ONNX Runtime with the whole graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, dict(inputs)), strict=True))


def check_stream(losses: Losses, path: Path, given: list[Any], expected: Any, **how: Any) -> None:
    """Each result once, in order, equal; afterwards all is free, and a load uses all again."""
    with edge.Cluster.connect(losses.addresses) as cluster:
        with cluster.load_graph(path, sample=given[0], **how) as graph:

            def inputs() -> Iterator[Any]:
                for number, each in enumerate(given):
                    losses.happen(number, graph.plan)
                    yield each

            count = 0
            for found, wanted in zip(graph.stream(inputs()), expected, strict=True):
                assert isinstance(found, dict)
                agree(found, wanted)
                count += 1
            assert count == INPUTS
        assert losses.stopped is not None
        assert losses.renewed is not None
        for daemon in (losses.stopped, losses.renewed, *losses.daemons.values()):
            daemon.await_free()
        with cluster.load_graph(path, sample=given[0], **how) as graph:
            assert set(graph.plan.devices) == set(NAMES)
            agree(graph.run(given[0]), expected[0])


@shown_in_parts("multiprocess/test_graphs.py", "unit/runs/test_graphs.py")
def test_results_come_once_in_order_though_devices_come_and_go(
    losses: Losses, tmp_path: Path
) -> None:
    given = [KINDS["cnn"][1](seed) for seed in range(INPUTS)]
    answer = answers(cnn())
    check_stream(losses, written(cnn(), tmp_path), given, [answer(each) for each in given])


@shown_in_parts("multiprocess/test_graphs.py", "unit/runs/test_graph_sequences.py")
def test_a_state_is_kept_though_devices_come_and_go(losses: Losses, tmp_path: Path) -> None:
    model = stateful(layers=LAYERS)
    random = np.random.default_rng(0)
    given = [
        {"x": x, "row": np.array(0)} for x in random.normal(0, 1, (INPUTS, 2, 8)).astype("float32")
    ]
    names = {f"new_state_{number}": f"state_{number}" for number in range(LAYERS)}
    answer, state = answers(model), {name: np.zeros((2, 8), np.float32) for name in names.values()}
    expected = []
    for each in given:
        results = answer({**each, **state})
        state = {name: results[output] for output, name in names.items()}
        expected.append({"y": results["y"]})
    check_stream(losses, written(model, tmp_path), given, expected, state=names)
