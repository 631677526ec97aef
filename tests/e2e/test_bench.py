"""The benchmark measures what it says, and its rows fit the file that is committed."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from edge.demos.bench import daemon_start, results, sealed_messages
from edge.demos.bench.results import Metric, Row
from edge.demos.bench.sealed_messages import WAYS
from edge.demos.bench.shapes import SHAPES, checkpoint
from edge.host.state_paths import STATE_VARIABLE
from edge.peer.news import FIRST_LOOK_S
from edge.weights.checkpoint import Checkpoint
from tests.support.processes import PATIENCE_S
from tests.support.slow_cases import shown_in_parts

REPOSITORY = Path(__file__).parents[2]


def test_the_committed_file_has_these_columns() -> None:
    with results.RESULTS.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == [field.name for field in fields(Row)]
        for row in reader:
            assert all(row.values()), row
            assert float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])


def test_rows_are_appended_below_one_header(tmp_path: Path) -> None:
    metric = Metric(name="decode", unit="tok/s", values=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert metric.percentiles == (2.0, 3.5, 5.0)
    rows = results.rows([metric], question="q", variant="a, b", link="l", model="m")
    path = tmp_path / "results.csv"
    results.append(rows, path)
    results.append(rows, path)
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 2
    assert read[0] == read[1]
    assert read[0]["variant"] == "a, b"
    assert (read[0]["p20"], read[0]["p50"], read[0]["p80"]) == ("2.0", "3.5", "5.0")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("tiny", 0.0032), ("small", 0.0763), ("H", 0.494), ("W", 1.1), ("T", 3.2)],
)
def test_the_shape_has_the_size_it_claims(name: str, billions: float) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_checkpoint_is_made_once_and_opens(tmp_path: Path) -> None:
    path = checkpoint("tiny", tmp_path)
    written = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert checkpoint("tiny", tmp_path) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == written
    with Checkpoint.open(path) as opened:
        assert opened.spec.num_layers == SHAPES["tiny"].num_layers
        assert opened.end_ids == frozenset()
        assert opened.tokenizer.decode(opened.tokenizer.encode("größer 😀")) == "größer 😀"
        weights = opened.store.read("model.layers.0.mlp.up_proj.weight")
    assert weights.dtype.name == "bfloat16"
    assert float(weights.astype("float32").std()) == pytest.approx(0.02, rel=0.01)


def medians_of(bench: str, tmp_path: Path, *options: object) -> dict[str, float]:
    """What a program of `demos/bench` prints, by name."""
    # Peers that were measured first answer no faster.
    program = (
        "from tests.support.known_rates import know_rates\n"
        f"from edge.demos.bench.{bench} import main\n"
        "know_rates(); main()"
    )
    command = [sys.executable, "-c", program, "--folder", str(tmp_path), *map(str, options)]
    run = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert run.returncode == 0, run.stderr
    return {
        match[1]: float(match[2])
        for match in re.finditer(r"^(\S.*?)  .* +[\d.e+]+ +([\d.e+]+) +[\d.e+]+$", run.stdout, re.M)
    }


def test_a_run_reports_speed_loading_and_memory(tmp_path: Path) -> None:
    options = ("--prompt-tokens", 8, "--new-tokens", 8, "--repeats", 2)
    medians = medians_of("bench_decode", tmp_path, *options)
    for timed in ("decode", "first token", "prefill", "load, shards cached"):
        assert medians[timed] > 0
    assert "load, quantising and sending" in medians
    planned = 0.0
    for peer in ("local-1", "local-2"):
        held = medians[f"{peer}: weights planned"] + medians[f"{peer}: KV planned"]
        idle = medians[f"{peer}: peak resident, before loading"]
        assert medians[f"{peer}: peak resident"] > idle + held
        planned += held
    assert 0.5 * planned < medians["bytes sent"] < 2 * planned
    assert not list(tmp_path.glob("shards-*"))


@shown_in_parts("multiprocess/test_kept_beginnings.py")
def test_turns_of_a_conversation_are_timed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights another row would be another answer."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    turns = ("--shape", "tiny", "--turns", 3, "--rounds", 1, "--answer-tokens", 32)
    medians = medians_of("conversation", tmp_path, *turns, "--compare")
    assert medians["tokens as computed anew in the same steps"] == 100
    assert medians["first token of a later turn"] > 0
    assert not list((tmp_path / "state").rglob("*.reply")), "each was gone on with"


def test_what_sealing_costs_is_measured_of_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_messages, "ROUNDS", 2)
    monkeypatch.setattr(sealed_messages, "WEIGHTS_BYTES", 1 << 20)
    found = sealed_messages.measure((1 << 10, 300 << 10), 3).metrics()
    names = {metric.name for metric in found}
    assert {f"{size} KiB, {way}" for size in (1, 300) for way in WAYS} < names
    assert "1 KiB, seal and open, cold" in names
    assert all(value > 0 for metric in found for value in metric.values)


def test_a_daemon_has_looked_around_before_it_answers_another_member() -> None:
    medians = {metric.name: metric.percentiles[1] for metric in daemon_start.measure(1).metrics()}
    assert medians["with keys, to another member"] >= FIRST_LOOK_S
    assert {"insecure", "with keys, to its own device"} < medians.keys()
