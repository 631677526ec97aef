"""Are predictions for graphs right? What was said of plans over links, and what came."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

import edge
from edge.demos.bench import case, results
from edge.demos.bench.clusters.bed import open_bed, why_not
from edge.demos.bench.clusters.table import GIB, MBIT, Device
from edge.demos.bench.graph_kinds import KINDS, MIDDLE, Kind, written
from edge.demos.bench.graph_rows import GRAPH_PREDICTIONS, Row, summary, table
from edge.demos.bench.graph_turns import interval_s, latencies_s
from edge.demos.bench.results import Conditions, Metric
from edge.demos.bench.turns import in_turn
from edge.demos.small_nets import placed
from edge.partition import GraphEstimate, GraphPlan

_RUNS, _STREAM_S, _ROUNDS = 5, 1.0, 4


def _devices(
    *links: tuple[float | None, float], quotas: Sequence[float] = (0.75, 0.75)
) -> list[Device]:
    """A device for each link: Mbit/s, and ms to the coordinator. The first is on core 0. The rest
    of the cores is for the coordinator and the networks."""
    return [
        Device(
            name="abc"[number],
            core=int(number > 0),
            quota=quotas[number],
            memory_bytes=3 * GIB,
            bytes_per_s=None if mbit is None else mbit * MBIT,
            delay_s=delay_ms / 1e3,
        )
        for number, (mbit, delay_ms) in enumerate(links)
    ]


CLUSTERS = {
    "one": _devices((None, 0), quotas=[1]),
    "two": _devices((None, 0), (None, 0)),
    "near": _devices((1000, 0.1), (1000, 0.1)),
    "100-mbit": _devices((100, 0.5), (100, 0.5)),
    "10-mbit": _devices((10, 1), (10, 1)),
    "far": _devices((1000, 10), (1000, 10)),
    "uneven-links": _devices((1000, 0.1), (100, 2)),
    "two-to-one": _devices((1000, 0.1), (1000, 0.1), quotas=(0.75, 0.375)),
    "three": _devices(*[(1000, 0.1)] * 3, quotas=(0.75, 0.375, 0.375)),
}
PAIRS = {
    f"{cluster} {kind}": (cluster, kind)
    for cluster, kinds in {
        "one": ("cnn", "recurrent"),
        "two": ("cnn", "encoder", "branches"),
        "near": ("cnn", "encoder", "branches", "quantised"),
        "100-mbit": ("encoder", "recurrent"),
        "10-mbit": ("recurrent",),
        "far": ("cnn", "branches"),
        "uneven-links": ("quantised", "encoder"),
        "two-to-one": ("cnn", "encoder"),
        "three": ("cnn",),
    }.items()
    for kind in kinds
}


@dataclass(frozen=True, slots=True)
class _Turn:
    """What came of one plan in one turn."""

    latency_s: float
    interval_s: float


def _measured_rows(name: str, folder: Path, conditions: Conditions, rounds: int) -> list[Row]:
    """Load every plan that is asked for, and let all compute in turn."""
    cluster_name, kind_name = PAIRS[name]
    devices, kind = CLUSTERS[cluster_name], KINDS[kind_name]
    path = written(kind_name, folder)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        bed = stack.enter_context(open_bed(devices, Path(cache), is_coordinator_apart=True))
        cluster = stack.enter_context(edge.Cluster.connect(bed.addresses))
        load = partial(cluster.load_graph, path, sample=kind.inputs(0))
        graphs: dict[GraphPlan, edge.Graph] = {}
        asked: dict[str, tuple[GraphPlan, GraphEstimate]] = {}

        def add(words: str, graph: edge.Graph) -> None:
            stack.enter_context(graph)
            asked[words] = graph.plan, graph.estimate
            graphs.setdefault(graph.plan, graph)

        add("latency", load(objective="latency"))
        add("throughput", load(objective="throughput"))
        alone = next(iter(graphs.values())).alone
        assert alone is not None, "the graph fits on each"
        add("one device", load(plan=alone[0]))
        if len(devices) > 1:
            add("by hand", load(plan=placed(path, [("a", MIDDLE), ("b", None)])))
        sides = {plan: partial(_turn, graph, kind) for plan, graph in graphs.items()}
        turns = list(in_turn(sides, rounds))
    return [
        _row(
            conditions,
            (f"{cluster_name}: {', '.join(each.words for each in devices)}", kind.words, words),
            said,
            [(turn[said[0]], turn[alone[0]]) for turn in turns],
        )
        for words, said in asked.items()
    ]


def _turn(graph: edge.Graph, kind: Kind, _number: int) -> _Turn:
    return _Turn(median(latencies_s(graph, kind, _RUNS)), interval_s(graph, kind, _STREAM_S))


def _row(
    conditions: Conditions,
    names: tuple[str, str, str],
    said: tuple[GraphPlan, GraphEstimate],
    turns: Sequence[tuple[_Turn, _Turn]],
) -> Row:
    plan, estimate = said
    cluster, graph, asked = names
    stages = (f"{each.device}: {each.atoms.start}-{each.atoms.stop - 1}" for each in plan.stages)
    times: dict[str, Any] = {}
    for what in ("latency_s", "interval_s"):
        own, alone = ([getattr(turn[which], what) for turn in turns] for which in (0, 1))
        told = getattr(estimate, what)
        low, middle, high = Metric(name=what, unit="s", values=own).percentiles
        word = what.removesuffix("_s")
        times |= {
            f"said_{what}": float(f"{told:.4g}"),
            f"{what}_p20": low,
            what: middle,
            f"{what}_p80": high,
            f"{word}_said_over_was": round(told / middle, 3),
            f"{word}_times_alone": round(median(map(truediv, alone, own)), 3),
        }
    return Row(
        **asdict(conditions),
        **times,
        cluster=cluster,
        graph=graph,
        asked=asked,
        plan=", ".join(stages),
    )


@case.command(
    click.option("--only", "names", multiple=True, metavar="NAME", type=click.Choice(list(PAIRS)),
                 help="Try this cluster and graph; may be repeated.  [default: all]"),
    click.option("--list", "is_list", is_flag=True, help="Show the names and end."),
    case.rounds(_ROUNDS),
    case.FOLDER,
)  # fmt: skip
def graph_predictions(
    names: Sequence[str], is_list: bool, rounds: int, folder: Path, append: bool
) -> None:
    """Are plans for graphs on pinned peers with networks what they are said to be?

    Asked are the plan of least latency, that of most throughput, the best single device, and two
    stages by hand; all compute in turn. Tensors pass the coordinator, which has a network of its
    own to each device. Needs root on Linux. Rows are in graph_predictions.csv.
    """
    if is_list:
        click.echo("\n".join(PAIRS))
        return
    if (reason := why_not()) is not None:
        raise click.ClickException(f"no pinned peers here: {reason}")
    console, rows, failures = Console(width=170), list[Row](), list[str]()
    conditions = results.conditions()
    for name in names or PAIRS:
        try:
            found = _measured_rows(name, folder, conditions, rounds)
        except (edge.EdgeError, OSError, ValueError, subprocess.CalledProcessError) as error:
            failures.append(f"{name}: {error}")
            continue
        rows += found
        console.print(table(found))
        if append:
            results.append(found, GRAPH_PREDICTIONS)
    console.print(summary(rows), highlight=False)
    if failures:
        raise SystemExit("\n".join(f"failed: {each}" for each in failures))
