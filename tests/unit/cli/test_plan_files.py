"""`--plan FILE`: what the file says wrong is told, as far as one can read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.cli.options import ClusterOptions, read_plan, way_to
from edge.errors import PlanError
from edge.planning.load_options import LoadOptions
from tests.support.plans import bundled_plan


def test_of_hundreds_of_problems_the_first_are_told(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"stages": [{}] * 300, "origin": "by hand"}))

    with pytest.raises(
        PlanError, match=r"plan\.json: .* And \d+ more problems; edge plan"
    ) as refused:
        read_plan(plan, "auto")

    assert len(refused.value.problems) >= 300
    assert len(str(refused.value)) < 4000


def test_as_many_peers_are_looked_for_as_a_plan_names() -> None:
    """The last of them may announce itself later than the others."""
    plan = bundled_plan("tensor_3")
    assert way_to(ClusterOptions(), LoadOptions(plan=plan)).named["at_least"] == 3
    assert "at_least" not in way_to(ClusterOptions(), LoadOptions()).named
    assert "at_least" not in way_to(ClusterOptions(local=3), LoadOptions(plan=plan)).named
