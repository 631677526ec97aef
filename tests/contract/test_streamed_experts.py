"""Experts that come from disk as tokens are routed to them give the bits of experts in memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edge.system.heap import with_malloc_settings
from tests.support.processes import run_module
from tests.support.slow_cases import shown_in_parts


@pytest.mark.parametrize(
    "plan",
    [
        "tensor",
        *(
            pytest.param(plan, marks=shown_in_parts("e2e/test_streamed_layers.py"))
            for plan in ("solo", "pipeline")
        ),
    ],
)
@pytest.mark.linux_ways
def test_whole_in_stages_and_in_parts_with_room_for_many_and_for_few(
    tmp_path: Path, plan: str
) -> None:
    run_module("tests.support.streamed_experts", tmp_path, plan)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux tells of memory")
@pytest.mark.linux_ways
def test_places_leave_no_holes_that_the_system_fills_when_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_malloc_settings(os.environ).items():  # else it begins twice
        monkeypatch.setenv(name, value)
    run_module("tests.support.many_places", tmp_path)
