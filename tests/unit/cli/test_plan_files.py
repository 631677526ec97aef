"""`--plan FILE`: what the file says wrong is told, as far as one can read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.cli.options import read_plan
from edge.errors import PlanError


def test_of_hundreds_of_problems_the_first_are_told(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"stages": [{}] * 300, "origin": "by hand"}))

    with pytest.raises(PlanError, match=r"plan\.json: .* And \d+ more problems\.$") as refused:
        read_plan(plan, "auto")

    assert len(refused.value.problems) >= 300
    assert len(str(refused.value)) < 4000
