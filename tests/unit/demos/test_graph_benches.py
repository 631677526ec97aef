"""Graphs of the benches, and the rows of their predictions."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from edge.demos.bench.clusters.table import CORES
from edge.demos.bench.graph_clusters import CLUSTERS, PAIRS
from edge.demos.bench.graph_kinds import KINDS, MIDDLE, written
from edge.demos.bench.graph_rows import GRAPH_PREDICTIONS, Row, summary, table
from edge.demos.small_nets import placed
from edge.graphs.atoms import Atoms
from edge.graphs.onnx_checks import open_onnx

ROW = Row(
    date="2026-01-01",
    commit="-",
    cluster="two: a, b",
    graph="a graph",
    asked="latency",
    plan="a: 0-3",
    said_latency_s=0.105,
    latency_s_p20=0.09,
    latency_s=0.1,
    latency_s_p80=0.11,
    latency_said_over_was=1.05,
    latency_times_alone=1.0,
    said_interval_s=0.08,
    interval_s_p20=0.09,
    interval_s=0.1,
    interval_s_p80=0.11,
    interval_said_over_was=0.8,
    interval_times_alone=0.9,
    hardware="-",
    versions="-",
)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_a_graph_that_can_be_cut_by_hand(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    file = open_onnx(path)
    assert [each.name for each in file.inputs] == ["x"]
    assert KINDS[name].inputs(0)["x"].shape == file.inputs[0].shape
    plan = placed(path, [("a", MIDDLE), ("b", None)])
    assert plan.devices == ("a", "b")
    assert plan.stages[1].atoms.stop == len(Atoms(file))
    before = path.stat().st_mtime_ns
    assert written(name, tmp_path).stat().st_mtime_ns == before


def test_every_cluster_fits_the_machine_and_is_used() -> None:
    assert {cluster for cluster, _kind in PAIRS.values()} == set(CLUSTERS)
    assert len({kind for _cluster, kind in PAIRS.values()}) >= 3
    for devices in CLUSTERS.values():
        assert len({device.name for device in devices}) == len(devices)
        for core in range(CORES):
            assert sum(each.quota for each in devices if each.core == core) <= 1


def test_what_is_within_is_told_in_a_line() -> None:
    rows = [ROW, replace(ROW, asked="throughput", latency_said_over_was=1.2)]
    assert ROW.are_within == (True, False)
    assert summary(rows) == (
        "within 10%: 1 of 2 latencies, 0 intervals; the best device's time over that of the chosen "
        "plan, at least: 1.00 for latency, 0.90 for throughput"
    )
    assert summary([]).startswith("within 10%: 0 of 0")
    assert table(rows).row_count == len(rows)


def test_the_file_has_these_columns() -> None:
    with GRAPH_PREDICTIONS.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == [field.name for field in dataclasses.fields(Row)]
        assert all(float(row["latency_s"]) > 0 for row in reader)
