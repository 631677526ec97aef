"""Graphs over daemons: a killed peer under a stream, and the commands of the guide."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge as edge_package
from edge.partition import GraphPlan, GraphStage
from tests.support.processes import ROOT, Daemon, edge, start_together
from tests.support.slow_cases import shown_in_parts
from tests.support.small_graphs import KINDS, agree, cnn, computed, early, pixels, stateful, written

KILLED_BEHIND = 20
INPUTS = 60


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    folder = tmp_path_factory.mktemp("daemons")

    def started(name: str) -> Daemon:
        return Daemon(folder / name, "--no-announce", "--name", name)

    with start_together(lambda: started("attic"), lambda: started("cellar")) as both:
        yield both


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the commands of the guide name."""
    written(cnn(), tmp_path)
    np.save(tmp_path / "x.npy", KINDS["cnn"][1](0)["x"])
    (tmp_path / "stateful.onnx").write_bytes(stateful().SerializeToString())
    (tmp_path / "early.onnx").write_bytes(early().SerializeToString())
    (tmp_path / "tiled.onnx").write_bytes(pixels().SerializeToString())
    picture = np.random.default_rng(0).standard_normal((1, 3, 152, 132), np.float32)
    np.save(tmp_path / "picture.npy", picture)
    np.save(tmp_path / "rows.npy", np.ones((5, 8), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_command_computes_and_saves_the_outputs(
    model_folder: Path, daemons: list[Daemon]
) -> None:
    peers = [word for each in daemons for word in ("--peer", each.address)]
    words = ("--input", "x=x.npy", "--output", "y=y.npy", "--json")
    done = edge("graph", "run", "model.onnx", *words, *peers)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["outputs"]["y"]["shape"] == [2, 4]
    assert told["difference"] is not None
    agree({"y": np.load(model_folder / "y.npy")}, computed(cnn(), KINDS["cnn"][1](0)))


@shown_in_parts("unit/runs/test_graphs.py", "multiprocess/test_graphs.py")
def test_the_commands_and_the_program_of_the_guide_run(
    model_folder: Path, capsys: pytest.CaptureFixture[str], daemons: list[Daemon]
) -> None:
    guide = (ROOT / "docs" / "guide" / "graphs.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(edge graph (?!generate).*)$", guide, re.MULTILINE)
    assert {each.split()[2] for each in commands} == {"inspect", "plan", "run", "bench"}
    for command in commands:
        words = shlex.split(command)[1:]
        if "--local" in words:  # two daemons for all commands
            place = words.index("--local")
            words[place : place + 2] = [w for d in daemons for w in ("--peer", d.address)]
        if "bench" in words:
            words += ["--runs", "3"]
        redirect = words.index(">") if ">" in words else len(words)
        done = edge(*words[:redirect])
        assert done.code == 0, done.err
        if redirect < len(words):
            (model_folder / words[-1]).write_text(done.out)
    programs = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    programs = [each for each in programs if "load_graph(" in each]
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, "graphs.md", "exec"), {})
    assert "(2, 4)" in capsys.readouterr().out
    saved = np.load(model_folder / "y.npy")
    agree({"y": saved}, computed(cnn(), KINDS["cnn"][1](0)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("inspect", "x.npy"), "not an ONNX file"),
        (("run", "model.onnx", "--input", "x"), "is not NAME=FILE"),
        (("run", "model.onnx", "--input", "x=model.onnx"), "cannot be read as an array"),
        (("run", "model.onnx", "--output", "z=z.npy"), "'z' is no output"),
        (("plan", "missing.onnx"), "cannot be read"),
        (("plan", "model.onnx", "--plan", "model.onnx"), "cannot be read as JSON"),
    ],
)
def test_mistakes_are_told_before_peers_start(
    words: tuple[str, ...], said: str, model_folder: Path
) -> None:
    done = edge("graph", *words, *(("--local", "1") if words[0] != "inspect" else ()))
    assert done.code in (1, 2)
    assert said in done.err


def test_a_graph_is_described_as_json(model_folder: Path) -> None:
    told = json.loads(edge("graph", "inspect", "model.onnx", "--json").out)
    assert told["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["n", 3, 16, 16]}]
    assert told["opsets"]["ai.onnx"] == 17


def test_every_result_comes_once_and_in_order_though_a_peer_is_killed(
    tmp_path: Path, daemons: list[Daemon]
) -> None:
    """The last test of this module: one of its daemons is lost."""
    path, inputs_of = written(cnn(), tmp_path), KINDS["cnn"][1]
    addresses = [daemon.address for daemon in daemons]
    both = GraphPlan(
        stages=(
            GraphStage(device="attic", atoms=range(4)),
            GraphStage(device="cellar", atoms=range(4, 10)),
        )
    )
    with (
        edge_package.Cluster.connect(addresses) as cluster,
        cluster.load_graph(path, plan=both, sample=inputs_of(0)) as graph,
    ):
        assert graph.agreement is not None
        assert graph.plan == both

        def inputs() -> Iterator[Any]:
            for seed in range(INPUTS):
                if seed == KILLED_BEHIND:
                    daemons[1].kill()
                yield inputs_of(seed)

        results = list(graph.stream(inputs()))
        assert graph.plan.devices == ("attic",)
    assert len(results) == INPUTS
    for seed in range(0, INPUTS, 7):
        result = results[seed]
        assert isinstance(result, dict)
        agree(result, computed(cnn(), inputs_of(seed)))
