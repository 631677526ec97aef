"""What experts cost that are brought in is measured as they run: in memory, and one by one."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_module


def test_both_ways_to_compute_experts_are_measured(tmp_path: Path) -> None:
    run_module("tests.support.experts_brought_in", tmp_path)
