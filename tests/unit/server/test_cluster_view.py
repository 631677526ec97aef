"""What a server tells of a plan, for pages and scripts."""

from __future__ import annotations

from dataclasses import replace

from edge.server.cluster_view import plan_view
from tests.unit.partition.test_plan_streaming import RATES
from tests.unit.planning.test_streaming_sentence import proposal


def test_notes_are_told() -> None:
    told = replace(proposal(1 << 20), notes=("pictures are read on attic",))
    assert plan_view(told, {"a": "attic"})["notes"] == ["pictures are read on attic"]


def test_a_predicted_rate_has_its_spread() -> None:
    spread = proposal(1 << 20, rates=replace(RATES, spread=(0.8, 1.25)))
    predicted = plan_view(spread, {"a": "attic"})["predicted"]
    low, high = predicted["tokens_per_s_range"]
    assert low < predicted["tokens_per_s"] < high
    assert plan_view(proposal(1 << 20, rates=None), {"a": "attic"})["predicted"] is None
