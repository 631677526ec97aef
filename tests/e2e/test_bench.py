"""The benchmark measures what it says, and its rows fit the file that is committed."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from edge.demos.bench import results
from edge.demos.bench.__main__ import CASES, main
from edge.demos.bench.gguf_file import make_gguf
from edge.demos.bench.llama_files import read_of_token
from edge.demos.bench.results import Metric, Row
from edge.demos.bench.turns import compared
from edge.demos.shapes import SHAPES, checkpoint
from edge.weights.checkpoint import Checkpoint
from tests.support.processes import PATIENCE_S

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


def medians_of(case: str, tmp_path: Path, *options: object) -> dict[str, float]:
    """What a case prints, by name. Its daemons are begun anew: it looks what they take."""
    # Peers that were measured first answer no faster.
    program = (
        "from tests.support.known_rates import know_rates\n"
        "from edge.demos.bench.__main__ import main\n"
        "know_rates(); main()"
    )
    words = [case, "--folder", tmp_path, *options]
    command = [sys.executable, "-c", program, *map(str, words)]
    run = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert run.returncode == 0, run.stderr
    return {
        match[1]: float(match[2])
        for match in re.finditer(r"^(\S.*?)  .* +[\d.e+]+ +([\d.e+]+) +[\d.e+]+$", run.stdout, re.M)
    }


def test_the_runner_lists_its_cases_each_with_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([])
    listed = capsys.readouterr().out
    for name, (_module, line) in CASES.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", listed, re.M)
        with pytest.raises(SystemExit, match=r"^0$"):
            main([name, "--help"])
        assert "Options:" in capsys.readouterr().out


def test_sides_take_turns_and_ratios_are_of_one_round() -> None:
    begun: list[str] = []

    def side(name: str, speed: float) -> Callable[[int], dict[str, float]]:
        def answer(number: int) -> dict[str, float]:
            begun.append(name)
            return {"decode": speed * 10**number}

        return answer

    found = compared({"one": side("one", 2.0), "two": side("two", 3.0)}, 2, over="one")
    assert begun == ["two", "one", "one", "two", "two", "one"]
    assert found.values == {
        ("decode, one", "tok/s"): [20.0, 200.0],
        ("decode, two", "tok/s"): [30.0, 300.0],
        ("decode, two / one", "ratio"): [1.5, 1.5],
    }


def test_a_run_reports_speed_loading_and_memory(tmp_path: Path) -> None:
    options = ("--prompt-tokens", 8, "--new-tokens", 8, "--repeats", 2)
    medians = medians_of("decode", tmp_path, *options)
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


def test_a_token_reads_the_head_and_the_experts_that_it_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the table, where it is no head."""
    sizes = replace(SHAPES["tiny"], num_layers=2, num_experts=5, top_k=2)
    monkeypatch.setitem(SHAPES, "sparse", sizes)
    path = tmp_path / "sparse.gguf"
    make_gguf(checkpoint("sparse", tmp_path), path)
    read = 4.0 * sizes.hidden_size * (2 * sizes.num_layers + 1)  # norms
    for name, (rows, columns) in sizes.matrices():
        if name != "model.embed_tokens.weight":
            bits = 32 if ".gate." in name else 4.5
            read += bits / 8 * rows * columns * (2 / 5 if ".experts." in name else 1)
    assert read_of_token(path) == pytest.approx(read)
