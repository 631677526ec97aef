"""A graph on peers of this machine: what a second one gains, and what a stage costs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

import edge
from edge.backends.onnx.runtime import ort
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.graph_kinds import KINDS, picture_net, written
from edge.demos.bench.graph_turns import interval_s, latencies_s
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import in_turn
from edge.demos.fleet import Fleet
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx

_STREAM_S = 2.0
_RUNS = 10
_SIDE, _TILES = 2048, (512, 32)
_OVERHEAD_RUNS_S = 1.0
"""Seconds of each side in a round."""


def only(*names: str) -> case.Option:
    """The kinds of graphs."""
    return click.option(
        "--only", "names", multiple=True, metavar="KIND", type=click.Choice(list(KINDS)),
        default=names, show_default=True, help="May be repeated.",
    )  # fmt: skip


@contextlib.contextmanager
def on_core(number: int) -> Iterator[None]:
    """This process is on one of its cores; processes that it starts stay there."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def pinned_peers(count: int) -> Iterator[edge.Cluster]:
    """Peers of one thread, each on a core of its own."""
    with tempfile.TemporaryDirectory() as folder, Fleet((), Path(folder)) as fleet:
        for number in range(count):
            with on_core(number):
                fleet.start(f"peer-{number}")
        with edge.Cluster.connect(list(fleet.addresses.values())) as cluster:
            yield cluster


@case.case(
    "what a second peer gains for a graph",
    only("cnn", "encoder"),
    case.rounds(8),
    case.FOLDER,
)
def graph_peers(given: Given) -> Iterator[Found]:
    """Inputs per second and the time of one input over two peers of a core each, by the plans that
    `auto` chooses, in turn with the best single one."""
    for name in given.names:
        kind, path, figures = KINDS[name], written(name, given.folder), Figures()
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(pinned_peers(2))
            load = partial(cluster.load_graph, path, sample=kind.inputs(0))
            graphs = {
                words: stack.enter_context(load(objective=words))
                for words in ("throughput", "latency")
            }
            alone = graphs["throughput"].alone
            assert alone is not None, "each has the memory"
            graphs["one peer"] = stack.enter_context(load(plan=alone[0]))

            def side(graph: edge.Graph, kind: Any, _number: int) -> tuple[float, float]:
                return median(latencies_s(graph, kind, _RUNS)), interval_s(graph, kind, _STREAM_S)

            sides = {words: partial(side, graph, kind) for words, graph in graphs.items()}
            for turn in in_turn(sides, given.rounds):
                for words, (latency_s, each_s) in turn.items():
                    figures.add(f"one input, {words}", "ms", 1e3 * latency_s)
                    figures.add(f"inputs, {words}", "1/s", 1 / each_s)
                (own_s, base_s) = (turn[words][1] for words in ("throughput", "one peer"))
                figures.add("inputs, throughput / one peer", "ratio", base_s / own_s)
                (own_s, base_s) = (turn[words][0] for words in ("latency", "one peer"))
                figures.add("one input, latency / one peer", "ratio", own_s / base_s)
            stages = {words: len(graph.plan.stages) for words, graph in graphs.items()}
        variant = "2 x 1 core, stages: " + ", ".join(f"{w} {n}" for w, n in stages.items())
        yield Found(figures=figures, variant=variant, model=f"{name}: {kind.words}")


@case.case(
    "a stage on one peer beside plain ONNX Runtime",
    only("tiny", "small", "cnn", "encoder"),
    case.rounds(20),
    case.FOLDER,
)
def graph_overhead(given: Given) -> Iterator[Found]:
    """The time of one input on one peer of one thread, and that of ONNX Runtime in a process of its
    own with one thread on the same core, in turn."""
    for name in given.names:
        kind, path, figures = KINDS[name], written(name, given.folder), Figures()
        with contextlib.ExitStack() as stack:
            with on_core(0):
                processes = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(1, processes, _open_plain, (path, name))
                plain = stack.enter_context(pool)
                plain.submit(_plain_s, 1).result()
            cluster = stack.enter_context(pinned_peers(1))
            stack.enter_context(on_core(1))
            graph = stack.enter_context(cluster.load_graph(path, sample=kind.inputs(0)))
            runs = max(5, min(500, round(_OVERHEAD_RUNS_S / graph.estimate.latency_s)))

            def one_stage(_number: int) -> float:
                return median(latencies_s(graph, kind, runs))  # noqa: B023 - called here

            def alone(_number: int) -> float:
                return plain.submit(_plain_s, runs).result()  # noqa: B023

            for turn in in_turn({"one stage": one_stage, "plain": alone}, given.rounds):
                for words, seconds in turn.items():
                    figures.add(f"one input, {words}", "ms", 1e3 * seconds)
                figures.add("added by the stage", "us", 1e6 * (turn["one stage"] - turn["plain"]))
                figures.add("one stage / plain", "ratio", turn["one stage"] / turn["plain"])
        variant = f"1 x 1 thread, medians of {runs} inputs"
        yield Found(figures=figures, variant=variant, model=f"{name}: {kind.words}")


@case.case("a large picture in tiles", case.rounds(4), case.FOLDER)
def graph_tiles(given: Given) -> Iterator[Found]:
    """A picture through seven convolutions, in tiles over two peers of a core each, in turn with
    the whole picture on one of them."""
    path = picture_net(given.folder / "picture.onnx")
    x = np.random.default_rng(0).standard_normal((1, 3, _SIDE, _SIDE), np.float32)
    figures, sample = Figures(), {"x": x}
    with pinned_peers(2) as cluster, contextlib.ExitStack() as stack:
        load = partial(cluster.load_graph, path, sample=sample)
        tiled = stack.enter_context(load(tiles=_TILES))
        one = {"stages": [{"device": cluster.peers[0].name, "atoms": [0, _count(path)]}]}
        whole = stack.enter_context(load(plan=one))
        expected = whole.run(sample)["y"]
        difference = np.abs(tiled.run(sample)["y"] - expected).max() / np.abs(expected).max()
        figures.add("difference, share of the largest value", "ratio", float(difference))

        def side(graph: edge.Graph, _number: int) -> float:
            began_s = time.perf_counter()
            graph.run(sample)
            return time.perf_counter() - began_s

        sides = {"tiles": partial(side, tiled), "whole": partial(side, whole)}
        for turn in in_turn(sides, given.rounds):
            for words, seconds in turn.items():
                figures.add(f"the picture, {words}", "s", seconds)
            figures.add("whole / tiles", "ratio", turn["whole"] / turn["tiles"])
        assert tiled.tiles is not None
        figures.add("the picture, tiles, predicted", "s", tiled.tiles.picture_s)
        count = tiled.tiles.count
    variant = f"2 x 1 core, {count} tiles of {_TILES[0]} that overlap by {_TILES[1]}"
    yield Found(figures=figures, variant=variant, model=f"7 convolutions, {_SIDE} x {_SIDE}")


def _count(path: Path) -> int:
    return len(Atoms(open_onnx(path)))


_PLAIN: dict[str, Any] = {}
"""In the process of ONNX Runtime alone: its session, and the kind of its graph."""


def _open_plain(path: Path, name: str) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    _PLAIN.update(session=session, kind=KINDS[name])


def _plain_s(runs: int) -> float:
    inputs = _PLAIN["kind"].inputs(runs)
    found = []
    for _ in range(runs):
        began_s = time.perf_counter()
        _PLAIN["session"].run(None, inputs)
        found.append(time.perf_counter() - began_s)
    return median(found)
