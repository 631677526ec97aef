"""Which peers a model is loaded on again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.backends.null.backend import NullBackend
from edge.demos.bundled import MODEL
from edge.models.spec import FILE_BLOCKS
from edge.peer.daemon import PeerDaemon
from edge.planning.proposal import Proposal, in_form_of
from edge.planning.repairing import repaired_proposal
from edge.runs.load import load_model
from edge.runs.model import RunningModel
from edge.runs.recovery import reloading
from edge.runs.recovery.candidates import Candidates
from edge.runs.recovery.reloading import Reloading
from edge.runs.run import PlanRun
from edge.weights.checkpoint import Checkpoint
from tests.support.null_peers import null_peers
from tests.support.passing_time import let_pass
from tests.support.plans import bundled_plan


def test_who_starts_again_without_keys_is_another_one_at_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def main() -> None:
        async with null_peers(tmp_path, 2) as (first, second):
            addresses = [each.resources.addresses[0] for each in (first, second)]
            async with await edge.AsyncCluster.connect(addresses, insecure=True) as cluster:
                ids = {peer.address: peer.id for peer in cluster.peers}
                plan = bundled_plan("solo", devices=[ids[addresses[0]]])
                load = cluster.load(MODEL, plan=plan, dtype="int8", replan="off")
                async with await load as model:
                    await second.aclose()
                    settings = replace(second.resources.settings, listen=addresses[1])
                    again = PeerDaemon(settings, None)
                    await again.start()
                    try:
                        before = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
                        await first.aclose()
                        after = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
                        assert after.token_ids == before.token_ids
                        assert model.plan.devices == (again.resources.id,)
                        await model.aclose()
                    finally:
                        await again.aclose()

    asyncio.run(main())


def test_peers_are_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as was asked for, however often loading is tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("edge.runs.recovery.reloading.LOOK_EVERY_S", 0.0)
    looks: list[Candidates] = []

    async def look(candidates: Candidates) -> None:
        looks.append(candidates)
        let_pass(400.0)

    monkeypatch.setattr(Candidates, "look", look)

    async def main() -> None:
        async with null_peers(tmp_path, 1) as (daemon,):
            addresses = daemon.resources.addresses[:1]
            async with await edge.AsyncCluster.connect(addresses, insecure=True) as cluster:
                load = cluster.load(MODEL, dtype="int8", replan="off", wait_for_peers_s=1000.0)
                async with await load as model:
                    await daemon.aclose()
                    with pytest.raises(edge.PeerLostError, match="none of the model's peers"):
                        await model.generate([1, 2, 3], max_new_tokens=8)
        assert len(looks) == 3

    asyncio.run(main())


def test_who_was_lost_while_it_loaded_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is waited for as others are, until it has freed what it held for a lost connection."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def main() -> None:
        async with null_peers(tmp_path, 1) as (daemon,):
            addresses = daemon.resources.addresses[:1]
            async with (
                await edge.AsyncCluster.connect(addresses, insecure=True) as cluster,
                await cluster.load(MODEL, dtype="int8", replan="off") as model,
            ):
                running = model._held.running
                assert isinstance(running, RunningModel)
                reload = running._reload
                assert isinstance(reload, Reloading)
                lost: list[Collection[str]] = []
                reload.on_lost = lost.append
                (peer,) = cluster.peers
                loaded = await reload({peer.name}, lambda _requests, _error: None)
                assert lost == [{peer.id}]
                assert [each.id for each in reload.came_back] == [peer.id]
                await loaded.aclose()

    asyncio.run(main())


def test_room_that_another_model_took_meanwhile_is_not_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two models lose the same device, and both plan with the room of the one that is
    left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def main() -> None:
        async with null_peers(tmp_path, 2, kv_disk_bytes=8 << 20) as peers:
            addresses = [each.resources.addresses[0] for each in peers]
            async with await edge.AsyncCluster.connect(addresses, insecure=True) as cluster:
                ids = [peer.resources.id for peer in peers]
                plan = bundled_plan("pipeline_2", devices=ids)
                model = await cluster.load(MODEL, plan=plan, dtype="int8", replan="off")
                others: list[edge.AsyncModel] = []

                async def load_between(*given: Any, **named: Any) -> PlanRun:
                    if not others:
                        alone = bundled_plan("solo", devices=ids[:1])
                        others.append(await cluster.load(MODEL, plan=alone, dtype="int8"))
                    return await load_model(*given, **named)

                monkeypatch.setattr(reloading, "load_model", load_between)
                before = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
                await peers[1].aclose()
                after = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
                assert after.token_ids == before.token_ids
                assert model.plan.devices == (ids[0],)
                assert others[0].plan.devices == (ids[0],)

    asyncio.run(main())


@pytest.mark.parametrize("is_alone", [True, False], ids=["it is alone", "beside one without room"])
def test_a_device_without_kernels_for_blocks_gets_packed_weights_where_no_other_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tried: list[bool] = []

    async def no_room(*given: Any, **named: Any) -> Proposal:
        options = given[2]
        tried.append(options.packs_blocks)
        if not options.packs_blocks and not is_alone:
            raise edge.CapacityError("the device with the kernels has no room")
        return await repaired_proposal(*given, **named)

    monkeypatch.setattr(reloading, "repaired_proposal", no_room)

    async def main() -> None:
        async with null_peers(tmp_path, 2 if is_alone else 3) as peers:
            addresses = [each.resources.addresses[0] for each in peers]
            async with await edge.AsyncCluster.connect(addresses, insecure=True) as cluster:
                plan = bundled_plan("solo", devices=[peers[0].resources.id])
                load = cluster.load(MODEL, plan=plan, dtype="int4", replan="off")
                async with await load as model:
                    running = model._held.running
                    assert isinstance(running, RunningModel)
                    reload = running._reload
                    assert isinstance(reload, Reloading)
                    was_packed = reload.options.packs_blocks
                    in_blocks = reload.forecast.proposal.model
                    before = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
                    # As where it has joined since, and is described for the first time.
                    lacks = NullBackend.lacks | {FILE_BLOCKS}
                    monkeypatch.setattr(peers[1].resources.backend(), "lacks", lacks)
                    await peers[0].aclose()
                    after = await model.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
                    assert after.token_ids == before.token_ids
                    assert tried == [False, True]
                    assert (was_packed, reload.options.packs_blocks) == (False, True)
                    with Checkpoint.open(MODEL) as checkpoint:
                        proposal = reload.forecast.proposal
                        assert proposal.model != in_blocks
                        assert proposal == in_form_of(proposal, checkpoint, reload.options)

    asyncio.run(main())
