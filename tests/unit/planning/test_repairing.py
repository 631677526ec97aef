"""A plan for those who are left, from what is known of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.errors import CapacityError, PlanError
from edge.host.cache_paths import cache_root
from edge.memory.shard_memory import most_overhead
from edge.partition import ClusterSpec, DeviceSpec, LinkSpec, Move, Plan, UnderWay, check_fit
from edge.planning.load_options import LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.planning.profile_cache import FactsCache
from edge.planning.proposal import Proposal, propose
from edge.planning.repairing import moved_proposal, repaired_proposal
from edge.protocol.peer_info import PeerInfo
from edge.runs.resolved import ResolvedLoad
from edge.weights.checkpoint import Checkpoint
from tests.support.known_rates import PROFILE
from tests.support.peer_infos import peer_info

PEERS = [peer_info(name) for name in "abcd"]
PIPELINE = LoadOptions(plan="pipeline", dtype="int4", wire="auto", stream="auto")


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(Path("demos/model")) as opened:
        yield opened


def before(
    checkpoint: Checkpoint, options: LoadOptions, *, memory_bytes: int = 1 << 30
) -> Proposal:
    """Three of the peers, with slow links, in a plan."""
    devices = tuple(
        DeviceSpec(id=id, name=id, memory_bytes=memory_bytes, threads=1, rates=PROFILE.rates)
        for id in "abc"
    )
    links = tuple(
        LinkSpec(source=one.id, target=other.id, latency_s=1e-3, bytes_per_s=1e6)
        for one in devices
        for other in devices
        if one is not other
    )
    cluster = ClusterSpec(devices=devices, links=links)
    sizes = LoadSizes.of(options, checkpoint.spec)
    return propose(checkpoint, cluster, options, sizes)


def repaired(
    checkpoint: Checkpoint,
    peers: list[PeerInfo],
    options: LoadOptions,
    old: Proposal,
    lost: set[str],
    **more: Any,
) -> Proposal:
    found = asyncio.run(
        repaired_proposal(checkpoint, peers, options, before=old, lost=lost, **more)
    )
    check_fit(found.plan, found.model, found.cluster, found.workload, is_repaired=True)
    return found


def test_a_stand_in_keeps_the_shape_and_the_form_on_the_wire(checkpoint: Checkpoint) -> None:
    old = before(checkpoint, PIPELINE)
    assert old.wire_rules.hops[0].format != "float32"
    form = PIPELINE.weight_format(checkpoint)
    remembered = FactsCache(cache_root() / "measured")
    remembered.keep_profile(PEERS[3], form.graded(checkpoint.spec), form, PROFILE)
    new = repaired(checkpoint, PEERS, PIPELINE, old, {old.plan.devices[1]})
    assert new.repair is not None
    assert new.repair.same_shape
    assert new.plan.devices == (old.plan.devices[0], "d", old.plan.devices[2])
    assert new.wire_rules == old.wire_rules
    assert new.choice.predicted is not None  # what d measured before is remembered
    assert new.predict(prompt_tokens=5, output_tokens=5) is not None
    assert new.plan.version == old.plan.version + 1


def test_those_who_are_left_share_the_layers_and_choose_the_form_anew(
    checkpoint: Checkpoint,
) -> None:
    old = before(checkpoint, PIPELINE)
    new = repaired(checkpoint, PEERS[:3], PIPELINE, old, {"b"})
    assert set(new.plan.devices) == {"a", "c"}
    assert len(new.wire_rules.hops) == len(new.plan.stages) - 1
    assert len(new.wire_rules.sums) == len(new.plan.stages)
    assert {row.device for row in new.rows} == {"a", "c"}


def test_peers_in_the_plan_keep_the_memory_that_the_model_fills(checkpoint: Checkpoint) -> None:
    full = [replace(peer, free_bytes=0, model_free_bytes=0) for peer in PEERS]
    old = before(checkpoint, PIPELINE)
    assert set(repaired(checkpoint, full, PIPELINE, old, {"b"}).plan.devices) == {"a", "c"}


def test_a_plan_by_hand_and_what_it_reads_from_disk(checkpoint: Checkpoint) -> None:
    tensor = before(checkpoint, replace(PIPELINE, plan="tensor")).plan
    assert isinstance(tensor, Plan)
    by_hand = replace(PIPELINE, plan=tensor, context_tokens=64)
    old = before(checkpoint, by_hand)
    new = repaired(checkpoint, PEERS[:3], by_hand, old, {"c"})
    assert [len(stage.shards) for stage in new.plan.stages] == [3]
    assert set(new.plan.devices) == {"a", "b"}
    tight = before(checkpoint, by_hand, memory_bytes=1 << 20)
    streamed = repaired(checkpoint, PEERS[:1], by_hand, tight, {"b", "c"})
    assert streamed.streaming is not None
    with pytest.raises(CapacityError, match=r"lacks .*--stream auto"):
        repaired(checkpoint, PEERS[:1], replace(by_hand, stream="off"), tight, {"b", "c"})


def test_where_nobody_is_left_there_is_no_plan(checkpoint: Checkpoint) -> None:
    old = before(checkpoint, PIPELINE)
    with pytest.raises(PlanError, match="no devices"):
        repaired(checkpoint, [], PIPELINE, old, {"a", "b", "c"})


def test_who_lacks_a_kernel_takes_no_layers(checkpoint: Checkpoint) -> None:
    old = before(checkpoint, PIPELINE)
    peers = [*PEERS[:3], replace(PEERS[3], backend="triton", lacks=("attention", "experts"))]
    assert set(repaired(checkpoint, peers, PIPELINE, old, {"b"}).plan.devices) == {"a", "c"}
    sentence = "no remaining device can compute this model: d is not used: .* for attention,"
    with pytest.raises(CapacityError, match=sentence):
        repaired(checkpoint, peers[3:], PIPELINE, old, {"a", "b", "c"})


def moved(
    checkpoint: Checkpoint,
    peers: list[PeerInfo],
    options: LoadOptions,
    old: Proposal,
    *,
    rates: Any = PROFILE.rates,
    under_way: UnderWay = UnderWay(),  # noqa: B008  frozen
) -> tuple[Move, Proposal | None]:
    measured = ClusterSpec(
        devices=tuple(replace(peer.device(), rates=rates) for peer in peers), links=()
    )
    move, proposal = asyncio.run(
        moved_proposal(
            checkpoint, peers, options, before=old, measured=measured, under_way=under_way
        )
    )
    assert (proposal is None) == (move.when == "stay")
    if proposal is not None:
        check_fit(
            proposal.plan, proposal.model, proposal.cluster, proposal.workload, is_repaired=True
        )
        assert move.to is not None
        assert (proposal.plan, proposal.repair) == (move.to.plan, move.to)
    return move, proposal


def test_who_joins_takes_a_model_back_into_memory(checkpoint: Checkpoint) -> None:
    """What the plan's devices were known to be fast, they still are; and their memory is as it was
    without the model."""
    auto = replace(PIPELINE, plan="auto", context_tokens=64)
    old = before(checkpoint, PIPELINE)
    lost = set(old.plan.devices) - {"a"}
    small = replace(old, cluster=replace_memory(old.cluster, 2 << 20))
    alone = repaired(checkpoint, PEERS[:1], auto, small, lost)
    assert alone.streaming is not None
    full = [replace(PEERS[0], free_bytes=0, model_free_bytes=0), PEERS[3]]
    move, new = moved(checkpoint, full, auto, alone)
    assert move.when == "now"
    assert new is not None
    assert new.streaming is None
    assert "d" in new.plan.devices
    assert {device.name for device in new.cluster.devices} == {"a", "d"}
    # Answers under way wait for nobody of another kind.
    other = [full[0], replace(PEERS[3], arithmetic="of another CPU")]
    answer = UnderWay(requests=1, prompt_tokens=9, answer_tokens=9, left_tokens=10**6)
    assert moved(checkpoint, full, auto, alone, under_way=answer)[0].when == "now"
    assert moved(checkpoint, other, auto, alone, under_way=answer)[0].when == "idle"


def test_a_plan_by_hand_is_gone_back_to(checkpoint: Checkpoint) -> None:
    tensor = before(checkpoint, replace(PIPELINE, plan="tensor")).plan
    by_hand = replace(PIPELINE, plan=tensor, context_tokens=64)
    old = before(checkpoint, by_hand)
    slow = replace(
        old,
        cluster=replace(
            old.cluster,
            devices=tuple(replace(device, rates=None) for device in old.cluster.devices),
        ),
    )
    left = repaired(checkpoint, PEERS[:2], by_hand, slow, {"c"})
    move, new = moved(checkpoint, PEERS[:3], by_hand, left, rates=None)
    assert move.when == "now"
    assert new is not None
    assert new.plan.stages == tensor.stages
    assert moved(checkpoint, [*PEERS[:2], PEERS[3]], by_hand, left)[0].when == "stay"


def replace_memory(cluster: ClusterSpec, memory_bytes: int) -> ClusterSpec:
    return replace(
        cluster,
        devices=tuple(replace(each, memory_bytes=memory_bytes) for each in cluster.devices),
    )


def test_a_plan_after_a_loss_keeps_the_limits_of_the_plan_before(checkpoint: Checkpoint) -> None:
    """The options of the load name no context: the proposal has decided it."""
    old = before(checkpoint, replace(PIPELINE, context_tokens=64))
    peers = PEERS[:2]
    found = repaired(checkpoint, peers, PIPELINE, old, {"c"})
    assert found.limits == old.limits
    steps = most_overhead(
        checkpoint.spec,
        old.limits,
        may_split=True,
        stream=False,
        kv_dtype="float32",
        has_tiles=True,
    )
    assert {each.buffer_bytes for each in found.overhead.values()} == {steps}
    assert ResolvedLoad.of(checkpoint, PIPELINE, found, peers).limits == old.limits
