"""`--plan FILE`: what the file says wrong is told, as far as one can read it; and how many local
peers a plan is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.cli import options
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


@pytest.mark.parametrize(
    ("peers", "load", "gpus", "expected"),
    [
        pytest.param({"local": 3}, {}, 0, 1, id="several of one machine divide it"),
        pytest.param({"local": 1}, {}, 0, 1, id="one is one"),
        pytest.param({}, {}, 0, None, id="none here"),
        pytest.param({"local": 3}, {"plan": "pipeline"}, 0, 3, id="a plan over several"),
        pytest.param({"local": 3}, {"copies": 2}, 0, 3, id="copies"),
        pytest.param({"local": 3}, {"draft": "small"}, 0, 3, id="a draft model beside it"),
        pytest.param({"local": 3, "threads": 1}, {}, 0, 3, id="threads of each"),
        pytest.param({"local": 3, "memory": "1GiB"}, {}, 0, 3, id="memory of each"),
        pytest.param({"local": 3, "model_memory": "1GiB"}, {}, 0, 3, id="the part for models"),
        pytest.param({"local": 2}, {}, 2, 2, id="a GPU for each"),
    ],
)
def test_one_local_peer_is_preferred_unless_several_are_asked_for(
    peers: dict[str, Any],
    load: dict[str, Any],
    gpus: int,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(options, "num_cuda_devices", lambda: gpus)
    monkeypatch.setattr(options, "usable_cores", lambda: 4)
    found = options.preferring_one(ClusterOptions(**peers), LoadOptions(**load))
    assert found.local == expected
    told = capsys.readouterr().err
    assert bool(told) == (found != ClusterOptions(**peers))
    if told:
        assert told.startswith("--local 3 would divide this machine's 4 cores and its memory")
        assert told.endswith("give --parallel pipeline or tensor.\n")
