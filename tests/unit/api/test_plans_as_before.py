"""By which plan a reply goes on: the one that it had, where that can still be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.answers.journal_folder import JournalFolder
from edge.api.kept_reply import KeptReply
from edge.api.loading import plan_as_before
from edge.errors import CapacityError
from edge.partition import Plan
from edge.planning.load_options import LoadOptions
from edge.protocol.lease import Lease
from tests.support.kept_journals import asked
from tests.support.peer_infos import peer_info


@pytest.mark.parametrize(
    ("names", "parallel", "fits", "tried"),
    [
        (["attic", "cellar"], "auto", True, [("attic", "cellar")]),
        (["cellar", "attic", "shed"], "auto", True, [("attic", "cellar")]),
        (["attic", "cellar"], "auto", False, [("attic", "cellar"), "auto"]),
        (["attic", "shed"], "auto", True, ["auto"]),
        (["attic", "cellar"], "pipeline", True, ["pipeline"]),
    ],
    ids=["as it was", "one came", "it lacks memory", "one has gone", "another is asked for"],
)
def test_the_plan_that_it_had(
    names: Sequence[str], parallel: Any, fits: bool, tried: list[object], tmp_path: Path
) -> None:
    found: list[object] = []

    async def propose(options: LoadOptions) -> Any:
        is_kept = isinstance(options.plan, Plan)
        found.append(options.plan.devices if isinstance(options.plan, Plan) else options.plan)
        if is_kept and not fits:
            raise CapacityError("attic lacks memory")
        return "proposal"

    journal = JournalFolder(tmp_path).begin(asked(), Lease())
    assert journal is not None
    with KeptReply(journal) as kept:
        options = replace(kept.options, plan=parallel)
        peers = [peer_info(name) for name in names]
        used, _proposal = asyncio.run(plan_as_before(propose, options, peers, kept))
    assert found == tried
    assert used == replace(options, plan=used.plan)
