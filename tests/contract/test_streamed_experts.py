"""Experts that come from disk as tokens are routed to them give the bits of experts in memory."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_module


def test_whole_in_stages_and_in_parts_with_room_for_many_and_for_few(tmp_path: Path) -> None:
    run_module("tests.support.streamed_experts", tmp_path)
