"""A model in a control group smaller than itself: the bench says what it reads and takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edge.demos.bench.disk import direct_read_rate
from edge.demos.bench.limited import LIMITS, PREFIX, QUICK
from edge.demos.control_groups import PARENTS, ControlGroup
from edge.demos.shapes import SHAPES
from tests.support.slow_cases import shown_in_parts

BENCH = [sys.executable, "-m", "edge.demos.bench", "bigger-than-memory"]


@pytest.fixture
def allowed(tmp_path: Path) -> None:
    try:
        with ControlGroup(f"{PREFIX}-{os.getpid()}-try", memory_bytes=1 << 30, disk=tmp_path):
            pass
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")


def medians(printed: str) -> dict[str, float]:
    return {
        match[1]: float(match[2])
        for match in re.finditer(r"^(\S.*?)  .* +[\d.e+]+ +([\d.e+]+) +[\d.e+]+$", printed, re.M)
    }


@shown_in_parts("e2e/test_streamed_layers.py", "multiprocess/test_streaming.py")
@pytest.mark.usefixtures("allowed")
def test_a_limited_model_says_the_same_and_reads_what_is_streamed(tmp_path: Path) -> None:
    command = [*BENCH, "--only", "quick", "--rounds", "1", "--folder", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = medians(run.stdout)
    assert found["tokens as without a limit"] == 1
    assert found["read for a token / streamed"] == pytest.approx(1, abs=0.3)
    assert found["decode, Edge"] > 0
    assert not [folder for parent in PARENTS for folder in parent.glob(f"{PREFIX}-*")]


def test_limits_are_listed_without_running_any() -> None:
    run = subprocess.run([*BENCH, "--list"], capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in run.stdout.splitlines()]
    assert listed == [each.name for each in LIMITS if each.name not in QUICK]
    assert {each.shape for each in LIMITS} <= set(SHAPES)


def test_a_file_is_read_to_its_end_by_any_number_of_threads(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(5 << 20))
    try:
        rates = [direct_read_rate(path, threads=count, piece_bytes=1 << 20) for count in (1, 3)]
    except OSError as error:
        pytest.skip(f"this file system has no direct reads: {error}")
    assert min(rates) > 0
