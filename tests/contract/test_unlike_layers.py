"""Layers of one model that differ in heads, head sizes, windows, rotation, biases, norms and width
are planned, cut, lowered and computed as a whole model of them in numpy is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import triton_face
from tests.support.processes import run_module
from tests.support.unlike_layers import FACTS, FULL, NARROW, PLANS, check, chosen_plan


@pytest.mark.linux_ways
def test_onnx_runtime_computes_them_over_every_plan_streamed_and_not(tmp_path: Path) -> None:
    run_module("tests.support.unlike_layers", tmp_path)


@pytest.mark.parametrize("name", [*(name for name in PLANS if name != "tensor"), "chosen"])
def test_triton_computes_them(name: str, tmp_path: Path) -> None:
    assert triton_face.device() == "cpu", "interpreted"
    check("triton", name, tmp_path)


def test_triton_streams_them(tmp_path: Path) -> None:
    check("triton", "tensor", tmp_path, streams=True)


def test_the_planner_cuts_each_kind_in_its_own_way() -> None:
    plan = chosen_plan()
    plan.validate(FACTS, None)
    (stage,) = plan.stages
    for kind, layer in enumerate((FULL, NARROW)):
        parts = [shard.slice(kind) for shard in stage.slices]
        assert sum(len(part.heads) for part in parts) == layer.mixer.num_units
        assert sum(len(part.ffn_columns) for part in parts) == layer.feed_forward.columns
        assert len(parts[0].ffn_columns) > len(parts[1].ffn_columns), "it is twice as fast"
