"""What is said of a plan that reads layers from disk, before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.partition import ClusterSpec, ComputeRates, choose
from edge.planning.proposal import Proposal
from edge.protocol.step import StepLimits
from edge.protocol.wire_rules import WireRules
from edge.transport import WireRule
from tests.unit.partition.test_plan_streaming import MODEL, RATES, WORKLOAD, device


def proposal(memory_bytes: int, *, peers: int = 1, rates: ComputeRates | None = RATES) -> Proposal:
    names = [chr(ord("a") + number) for number in range(peers)]
    cluster = ClusterSpec(devices=tuple(device(name, memory_bytes, rates) for name in names))
    choice = choose(MODEL, cluster, WORKLOAD, stream=True)
    stages = len(choice.plan.stages)
    return Proposal(
        dtype="float32",
        weights="float32",
        choice=choice,
        model=MODEL,
        cluster=cluster,
        workload=WORKLOAD,
        limits=StepLimits(context_tokens=4096, chunk_tokens=4, requests=1, cached_tokens=4096),
        wire_rules=WireRules(sums=(WireRule(),) * stages, hops=(WireRule(),) * (stages - 1)),
    )


@pytest.mark.parametrize("peers", [1, 2])
def test_how_many_layers_and_how_fast(peers: int) -> None:
    streamed = proposal(700, peers=peers)
    count = sum(stage.slices[0].streamed_layers for stage in streamed.plan.stages)
    assert count > 0
    assert streamed.choice.predicted is not None
    assert streamed.streaming == (
        "m does not fit into memory and reads layers from disk for each token: "
        f"{count} of 10 layers, at about {streamed.choice.predicted.tokens_per_s:.2g} tok/s"
    )


def test_the_speed_is_said_with_its_spread() -> None:
    streamed = proposal(700, rates=replace(RATES, spread=(0.5, 2.0)))
    assert streamed.choice.predicted is not None
    low, high = streamed.choice.predicted.tokens_per_s_range
    assert f", at about {low:.2g}–{high:.2g} tok/s" in str(streamed.streaming)
    assert f", {low:.2g}–{high:.2g} tok/s predicted>" in repr(streamed)


def test_a_device_that_was_not_measured_has_no_speed() -> None:
    assert str(proposal(700, rates=None).streaming).endswith("layers, at an unknown speed")


def test_a_model_that_fits_has_nothing_to_say() -> None:
    assert proposal(1 << 20).streaming is None
