"""Choices for devices one can picture: who works, who stays out, and why."""

import random
import time
from bisect import bisect
from dataclasses import replace

import pytest

from edge.partition import (
    CapacityError,
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    LinkSpec,
    Parallel,
    PlanError,
    Workload,
    check_fit,
    check_links,
    choose,
    describe_plan_in_words,
    estimate,
)
from edge.partition.cost.message_times import NO_LINK_S
from edge.partition.search.choose import LEAST_GAIN, LEAST_GAIN_ON_ONE_HOST
from tests.support.facts import crowd_of, llama_facts, usual_rates

GIB = 2**30
GIGABIT = (0.2e-3, 117e6)
CABLE = (15e-6, 5e9)


SMALL = llama_facts(22, 2048, 5632, 32, 4, 32_000, bits=6)
LARGE = llama_facts(80, 8192, 28_672, 64, 8, 128_256, bits=6)
"""Of 4-bit weights, packed to 6 bits."""


def rates(bytes_per_s: float) -> ComputeRates:
    return usual_rates(
        bytes_per_s,
        shared=2.0,
        attention_slice_s=(20e-6,) * 4,
        feed_forward_slice_s=(10e-6,) * 4,
        attention_s=(1e-9,) * 4,
        run_s=20e-6,
        jitter=0.05,
    )


def cluster(
    *devices: tuple[float, float], link: tuple[float, float] = GIGABIT, host: str = ""
) -> ClusterSpec:
    """Devices a, b, c, ... of (GiB, bytes per second)."""
    specs = tuple(
        DeviceSpec(
            id=f"{index:02}",
            name=chr(ord("a") + index),
            memory_bytes=int(gib * GIB),
            threads=1,
            host=host,
            rates=rates(bytes_per_s),
        )
        for index, (gib, bytes_per_s) in enumerate(devices)
    )
    links = tuple(
        LinkSpec(source=one.id, target=other.id, latency_s=link[0], bytes_per_s=link[1])
        for one in specs
        for other in specs
        if one is not other
    )
    return ClusterSpec(devices=specs, links=links)


def test_over_a_slow_link_one_device_is_faster_and_says_so() -> None:
    devices = cluster((4, 30e9), (4, 30e9), link=(5e-3, 10e6))
    choice = choose(SMALL, devices, Workload())
    assert choice.plan.devices == ("00",)
    assert choice.predicted is not None
    assert choice.solo is not None
    assert choice.predicted == choice.solo.estimate
    assert (choice.solo.device, choice.solo.name) == ("00", "a")
    (left_out,) = choice.left_out
    assert left_out.name == "b"
    assert left_out.reason.startswith(("its link would add ", "too slow to help: with it"))
    assert choice.runners_up
    assert choice.predicted.bottleneck.startswith("reading the weights on a: ")


def test_over_a_fast_link_two_devices_share_every_layer() -> None:
    devices = cluster((4, 30e9), (4, 30e9), link=CABLE)
    choice = choose(SMALL, devices, Workload())
    assert describe_plan_in_words(choice.plan, devices) == "a + b: layers 0-21, heads 16:16"
    assert choice.left_out == ()
    assert choice.predicted is not None
    assert choice.solo is not None
    assert choice.predicted.tokens_per_s > 1.5 * choice.solo.estimate.tokens_per_s


def test_shares_follow_the_rates() -> None:
    devices = cluster((4, 10e9), (4, 30e9), link=CABLE)
    shards = choose(SMALL, devices, Workload()).plan.stages[0].slices
    columns = {shard.device: len(shard.ffn_columns) for shard in shards}
    assert columns["01"] == pytest.approx(3 * columns["00"], rel=0.05)


def test_two_devices_of_one_host_gain_nothing_from_each_other() -> None:
    """Where they took twice as long together."""
    devices = cluster((4, 30e9), (4, 30e9), link=CABLE, host="h")
    sum_s = estimate(
        choose(SMALL, devices, Workload(), parallel="tensor").plan, SMALL, devices, Workload()
    ).token_s / (2 * SMALL.num_layers)
    crowd = crowd_of(2, (sum_s,), slower=(2.0,))
    assert len(choose(SMALL, devices, Workload()).plan.devices) == 2
    crowded = replace(devices, crowds=(crowd,))
    assert choose(SMALL, crowded, Workload()).plan.devices == ("00",)


def test_no_device_more_for_a_gain_that_no_prediction_can_promise() -> None:
    devices = cluster((4, 30e9), (4, 30e9), link=CABLE, host="h")

    def costing(sum_s: float) -> ClusterSpec:
        return replace(devices, crowds=(crowd_of(2, (sum_s,)),))

    def gain(sum_s: float) -> float:
        both = choose(SMALL, costing(sum_s), Workload(), parallel="tensor").predicted
        alone = choose(SMALL, costing(sum_s), Workload()).solo
        assert both is not None
        assert alone is not None
        return alone.estimate.total_s(Workload()) / both.total_s(Workload()) - 1

    small_s = bisect(range(2000), -0.07, key=lambda us: -gain(us * 1e-6)) * 1e-6
    assert LEAST_GAIN < gain(small_s) < LEAST_GAIN_ON_ONE_HOST < gain(0.0)
    assert len(choose(SMALL, costing(0.0), Workload()).plan.devices) == 2
    choice = choose(SMALL, costing(small_s), Workload())
    assert choice.plan.devices == ("00",)
    (left_out,) = choice.left_out
    assert left_out.reason.startswith("too small a gain: with it an answer would take ")
    apart = replace(
        costing(small_s),
        devices=tuple(replace(each, host=each.id) for each in devices.devices),
        links=tuple(replace(link, latency_s=link.latency_s + small_s) for link in devices.links),
    )
    assert len(choose(SMALL, apart, Workload()).plan.devices) == 2, "each on a host of its own"


def test_a_useless_device_is_left_out() -> None:
    devices = cluster((4, 30e9), (4, 30e9), (0, 30e9), (4, 0.1e9), link=CABLE)
    choice = choose(SMALL, devices, Workload())
    assert set(choice.plan.devices) == {"00", "01"}
    empty, slow = choice.left_out
    assert empty.reason == "memory: no part of the model fits into its 0 bytes"
    assert slow.reason.startswith("too slow to help: with it an answer would take ")


def test_stages_follow_the_fast_links() -> None:
    devices = cluster((0.5, 30e9), (0.5, 30e9), (0.5, 30e9), link=(20e-3, 10e6))
    fast = {("00", "02"), ("02", "01"), ("01", "00")}
    links = tuple(
        replace(link, latency_s=1e-3) if (link.source, link.target) in fast else link
        for link in devices.links
    )
    choice = choose(SMALL, replace(devices, links=links), Workload(), parallel="pipeline")
    order = choice.plan.devices
    assert {(order[0], order[1]), (order[1], order[2]), (order[2], order[0])} == fast


def test_memory_decides_where_it_is_short() -> None:
    devices = cluster((0.3, 60e9), (2, 10e9))
    choice = choose(SMALL, devices, Workload())
    assert choice.solo is not None
    check_fit(choice.plan, SMALL, devices, Workload())


def test_too_little_memory_says_what_is_missing_and_that_is_enough() -> None:
    devices = cluster((0.2, 30e9), (0.3, 30e9))
    with pytest.raises(CapacityError) as caught:
        choose(SMALL, devices, Workload())
    missing = {shortage.device: shortage.missing_bytes for shortage in caught.value.shortages}
    enough = replace(
        devices,
        devices=tuple(
            replace(device, memory_bytes=device.memory_bytes + missing.get(device.id, 0))
            for device in devices.devices
        ),
    )
    check_fit(choose(SMALL, enough, Workload()).plan, SMALL, enough, Workload())


def unmeasured(devices: ClusterSpec, *numbers: int) -> ClusterSpec:
    return replace(
        devices,
        devices=tuple(
            replace(device, rates=None) if number in numbers else device
            for number, device in enumerate(devices.devices)
        ),
    )


def test_no_measured_device_means_no_predictions() -> None:
    devices = unmeasured(cluster((4, 30e9), (4, 30e9), link=CABLE), 0, 1)
    choice = choose(SMALL, devices, Workload())
    assert choice.plan.devices == ("00",)
    assert (choice.predicted, choice.solo) == (None, None)
    assert choice.left_out == ()
    assert choice.runners_up == ()


def test_devices_that_were_not_measured_are_left_out() -> None:
    """The others are planned as if those were not there."""
    devices = cluster((4, 30e9), (4, 30e9), (4, 30e9), link=CABLE)
    choice = choose(SMALL, unmeasured(devices, 0), Workload())
    alone = choose(SMALL, devices.without("00"), Workload())
    assert (choice.plan, choice.predicted, choice.solo) == (alone.plan, alone.predicted, alone.solo)
    assert choice.left_out[0].device == "00"
    assert "not measured" in choice.left_out[0].reason
    assert choice.left_out[1:] == alone.left_out


def test_what_was_not_measured_is_used_where_the_others_are_not_enough() -> None:
    devices = cluster((0.5, 30e9), (0.5, 30e9), link=CABLE)
    choice = choose(SMALL, unmeasured(devices, 1), Workload())
    assert set(choice.plan.devices) == {"00", "01"}
    assert choice.predicted is None


def without_link(devices: ClusterSpec, one: str, other: str) -> ClusterSpec:
    links = [link for link in devices.links if {link.source, link.target} != {one, other}]
    links += [
        LinkSpec(source=source, target=target, latency_s=NO_LINK_S, bytes_per_s=1.0)
        for source, target in ((one, other), (other, one))
    ]
    return replace(devices, links=tuple(links))


def test_devices_that_cannot_reach_each_other_are_not_in_one_plan() -> None:
    devices = cluster((4, 30e9), (4, 30e9), link=CABLE)
    assert len(choose(SMALL, devices, Workload()).plan.devices) == 2
    apart = without_link(devices, "00", "01")
    choice = choose(SMALL, apart, Workload())
    assert choice.plan.devices == ("00",)
    assert choice.left_out[0].reason == "it cannot reach a"
    check_links(choice.plan, apart)


def test_whoever_samples_must_reach_every_device() -> None:
    """Four stages in every order, of which two devices at the ends cannot reach each other."""
    devices = cluster(*[(0.3, 30e9)] * 4, link=CABLE)
    apart = without_link(devices, "01", "03")
    choice = choose(SMALL, apart, Workload(prompt_tokens=32, output_tokens=8), parallel="pipeline")
    assert len(choice.plan.devices) == 4
    check_links(choice.plan, apart)
    assert choice.plan.stages[-1].slices[0].device not in ("01", "03")


def test_reading_from_disk_is_looked_at_beside_devices_that_were_not_measured() -> None:
    devices = unmeasured(cluster((0.6, 30e9), (0.6, 30e9), (4, 30e9), link=(60.0, 1e6)), 2)
    resident = choose(SMALL, devices, Workload())
    assert len(resident.plan.devices) == 2
    streamed = choose(SMALL, devices, Workload(), stream=True)
    assert len(streamed.plan.devices) == 1
    assert "not measured" in streamed.left_out[-1].reason


@pytest.mark.parametrize("parallel", ["auto", "pipeline", "tensor"])
def test_a_plan_for_two_that_cannot_reach_each_other_names_them(parallel: Parallel) -> None:
    """Only both together have the memory, or both are asked for."""
    room = 0.5 if parallel == "auto" else 4
    devices = without_link(cluster((room, 30e9), (room, 30e9), link=CABLE), "00", "01")
    plan = choose(SMALL, devices, Workload(), parallel=parallel).plan
    with pytest.raises(PlanError, match="a and b cannot reach each other"):
        check_links(plan, devices)


def test_each_chunk_of_a_prompt_takes_its_way_over_the_link() -> None:
    """Of a pipeline over a slow link, the link decides how fast chunks follow each other."""
    devices = cluster((4, 30e9), (4, 30e9), link=(0.0, 1e6))
    first_s = [
        choose(
            SMALL, devices, Workload(prompt_tokens=256 * count, output_tokens=1),
            parallel="pipeline", chunk_tokens=256,
        ).predicted.first_token_s  # type: ignore[union-attr]
        for count in (4, 5)
    ]  # fmt: skip
    assert first_s[1] - first_s[0] > 256 * SMALL.wire_row_bytes / 1e6


def test_ties_go_to_the_order_of_the_cluster() -> None:
    devices = cluster((4, 30e9), (4, 30e9), (4, 30e9), link=(1, 1e6))
    assert choose(SMALL, devices, Workload()).plan.devices == ("00",)


def test_words_for_stages_and_shares() -> None:
    devices = cluster((2, 20e9), (2, 20e9))
    pipeline = choose(SMALL, devices, Workload(), parallel="pipeline")
    assert describe_plan_in_words(pipeline.plan, devices) == "a: layers 0-10 | b: layers 11-21"
    tensor = choose(SMALL, devices, Workload(), parallel="tensor")
    assert describe_plan_in_words(tensor.plan, devices) == "a + b: layers 0-21, heads 16:16"


def test_sixteen_different_devices_for_a_model_of_80_layers() -> None:
    source = random.Random(1)
    devices = cluster(
        *[(source.uniform(3, 9), source.uniform(8e9, 50e9)) for _ in range(16)], link=CABLE
    )
    start_s = time.process_time()
    choice = choose(LARGE, devices, Workload())
    print(f"16 devices, 80 layers: {time.process_time() - start_s:.2f} s of one core")
    check_fit(choice.plan, LARGE, devices, Workload())
    assert choice.predicted is not None
    assert choose(LARGE, devices, Workload()) == choice
