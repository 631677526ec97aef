"""From peers to a plan: what is asked of them first, what is known then, and what does not fit.

Peers that compute nothing, in this process: they measure themselves and their links as others do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edge.demos.bundled import MODEL
from edge.errors import CapacityError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.planning.load_options import LoadOptions
from edge.planning.measured_proposal import Measure, forget_measured, measured_proposal
from edge.planning.proposal import Proposal
from edge.progress import Progress
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import null_peers
from tests.support.plans import bundled_plan

BOTH = ["", "null-0", "null-1"]
"""Two peers, and "" for the link between them."""


@dataclass(kw_only=True)
class Planner:
    """Asks for plans over the same peers, and hears what is measured for each."""

    checkpoint: Checkpoint
    peers: Sequence[PeerInfo]
    measured: list[str] = field(default_factory=list)

    async def propose(self, measure: Measure = "needed", **options: Any) -> Proposal:
        heard: list[Progress] = []
        found = await measured_proposal(
            self.checkpoint,
            self.peers,
            LoadOptions(**{"dtype": "int8", **options}),
            measure=measure,
            on_progress=heard.append,
        )
        self.measured = sorted(each.peer for each in heard if each.done == each.total)
        return found


@contextlib.asynccontextmanager
async def planner(
    folder: Path, count: int = 2, *, model_memory_bytes: int | None = None
) -> AsyncIterator[Planner]:
    async with null_peers(folder, count, model_memory_bytes=model_memory_bytes) as daemons:
        peers = [await describe_peer(each.resources.addresses[0], None) for each in daemons]
        with Checkpoint.open(MODEL) as checkpoint:
            yield Planner(checkpoint=checkpoint, peers=peers)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is remembered here, for one test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def test_what_is_not_known_is_measured_where_it_can_change_the_plan(tmp_path: Path) -> None:
    async def main() -> None:
        async with planner(tmp_path) as plans:
            blind = await plans.propose("nothing")
            assert (plans.measured, blind.choice.predicted) == ([], None)
            assert len(blind.plan.devices) == 1, "a second one might be slower"
            seen = await plans.propose("missing")
            assert plans.measured == BOTH
            assert seen.choice.predicted is not None
            for measure in ("nothing", "needed", "missing"):
                again = await plans.propose(measure)
                assert set(plans.measured) <= {""}, "it is remembered; a link may have changed"
                assert again.choice.predicted is not None
            await plans.propose("again")
            assert plans.measured == BOTH
            forget_measured(plans.peers)
            await plans.propose("missing")
            assert plans.measured == BOTH

    asyncio.run(main())


def test_a_load_takes_a_first_look_that_stands_until_all_is_measured(tmp_path: Path) -> None:
    async def main() -> None:
        async with planner(tmp_path) as plans:
            for looked_at in (["null-0"], []):  # the other one is set up alike
                rough = await plans.propose("needed")
                assert plans.measured == looked_at
                assert rough.is_rough
                assert rough.choice.predicted is not None
            assert (await plans.propose("nothing")).choice.predicted is not None
            measured = await plans.propose("missing")
            assert plans.measured == BOTH
            assert not measured.is_rough
            assert not (await plans.propose("needed")).is_rough

    asyncio.run(main())


def test_one_device_is_not_measured_before_it_starts(tmp_path: Path) -> None:
    async def main() -> None:
        async with planner(tmp_path, 1) as plans:
            assert (await plans.propose()).choice.predicted is None
            assert plans.measured == []
            assert (await plans.propose("missing")).choice.predicted is not None
            assert plans.measured == ["null-0"]
            assert (await plans.propose()).choice.predicted is not None, "it is remembered"

    asyncio.run(main())


def test_a_plan_by_hand_waits_for_no_measurement(tmp_path: Path) -> None:
    async def main() -> None:
        async with planner(tmp_path) as plans:
            plan = (await plans.propose("missing", plan="pipeline")).plan
            by_hand = await plans.propose(plan=plan)
            assert (by_hand.plan, set(plans.measured) <= {""}) == (plan, True)
            assert by_hand.choice.predicted is not None
            forget_measured(plans.peers)
            unknown = await plans.propose(plan=plan)
            assert (unknown.choice.predicted, plans.measured) == (None, [])
            await plans.propose(plan=plan, wire="auto")
            assert plans.measured == ["null-0"], "how activations travel depends on the link"

    asyncio.run(main())


def test_the_context_is_as_long_as_there_is_room_for_and_no_longer_than_asked(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with planner(tmp_path, 1) as plans:
            assert (await plans.propose()).context_tokens == plans.checkpoint.spec.context_tokens
            assert (await plans.propose(context_tokens=32)).context_tokens == 32

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["auto", "by hand"])
def test_what_does_not_fit_says_what_would(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with planner(tmp_path, 1, model_memory_bytes=3 << 20) as plans:
            cut = bundled_plan("solo", devices=[plans.peers[0].id])
            asked: dict[str, Any] = {"dtype": "float32", "context_tokens": 64, "stream": "off"}
            with pytest.raises(CapacityError) as raised:
                await plans.propose(plan="auto" if kind == "auto" else cut, **asked)
            assert "lacks" in str(raised.value)
            assert "With int8 it would fit." in str(raised.value)
            ways = "--stream auto" in str(raised.value)
            assert ways == (kind == "auto"), "of a plan by hand, each layer's place is said"
            assert (await plans.propose(**{**asked, "dtype": "int8"})).plan
            with pytest.raises(CapacityError, match="No smaller dtype would be enough"):
                await plans.propose(dtype="int4", context_tokens=128, concurrency=64)
            assert plans.measured == []

    asyncio.run(main())


def test_layers_are_read_from_disk_only_where_there_is_no_other_way(tmp_path: Path) -> None:
    """How fast the disk makes it is measured first: its user wants to know before it starts."""

    async def main() -> None:
        async with planner(tmp_path, 1, model_memory_bytes=3 << 20) as plans:
            asked: dict[str, Any] = {"dtype": "float32", "context_tokens": 64}
            found = await plans.propose(**asked)
            assert plans.measured == ["null-0"]
            assert sum(row.streamed_layers for row in found.rows) > 0
            assert found.streaming is not None
            with pytest.raises(CapacityError, match="lacks"):
                await plans.propose(stream="off", **asked)
            fits = await plans.propose(**{**asked, "dtype": "int4"})
            assert fits.streaming is None

    asyncio.run(main())


def test_daemons_of_one_machine_do_not_plan_its_memory_twice(tmp_path: Path) -> None:
    """Each tells all that is free there. A plan over both is made again when that is too little."""

    async def main() -> None:
        async with planner(tmp_path) as plans:
            wanted: dict[str, Any] = {"plan": "pipeline", "context_tokens": 64}
            whole = await plans.propose("nothing", **wanted)
            taken = [
                row.memory.total + whole.overhead[row.device].buffer_bytes for row in whole.rows
            ]
            assert len(taken) == 2
            free_bytes = sum(taken)

            def share(pool_free_bytes: int) -> None:
                plans.peers = [
                    replace(
                        peer,
                        memory_pool="m",
                        pool_free_bytes=pool_free_bytes,
                        free_bytes=free_bytes,
                        free_now_bytes=free_bytes,
                        model_free_bytes=free_bytes,
                    )
                    for peer in plans.peers
                ]

            share(free_bytes)
            assert (await plans.propose("nothing", **wanted)).plan == whole.plan
            share(max(taken))
            with pytest.raises(CapacityError):
                await plans.propose("nothing", stream="off", **wanted)

    asyncio.run(main())
