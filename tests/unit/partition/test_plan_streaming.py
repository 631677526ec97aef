"""Layers on disk: what they leave in memory, what they cost in time, and when they are chosen."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from edge.partition import (
    CapacityError,
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    LinkSpec,
    Plan,
    PlanError,
    Shard,
    Stage,
    Workload,
    choose,
    describe,
    describe_plan_in_words,
    estimate,
    memory_use,
)
from edge.partition.fit.check import check_fit
from edge.partition.fit.streamed_layers import loads_of
from edge.partition.plan.expert_tiers import PLACE_BYTES, WINDOW_LAYERS
from tests.support.facts import changed_facts, plain_rates
from tests.unit.partition.test_plan_cost import MODEL as FEW_LAYERS

LAYERS = 10
MODEL = changed_facts(FEW_LAYERS, num_layers=LAYERS)

NUM_EXPERTS, COLUMN_BYTES = 40, 10**6
SPARSE = changed_facts(
    MODEL,
    num_experts=NUM_EXPERTS,
    top_k=2,
    expert_column_bytes=COLUMN_BYTES,
    ffn_column_bytes=NUM_EXPERTS * COLUMN_BYTES,
)
EXPERT_BYTES = SPARSE.kinds[0].ffn_columns * COLUMN_BYTES
EXPERT_PLACE_BYTES = EXPERT_BYTES + PLACE_BYTES
MATRIX_BYTES = 130
"""Of a layer; its norms and biases are 20 more."""

HEAD_BYTES, EMBEDDING_BYTES = 10 * 3, 10 * 7
VOCAB_BYTES = HEAD_BYTES + EMBEDDING_BYTES
WORKLOAD = Workload(prompt_tokens=1, output_tokens=10, reserved_tokens=1)
KV_BYTES = LAYERS * 2
WHOLE_BYTES = LAYERS * (MATRIX_BYTES + 20) + VOCAB_BYTES + KV_BYTES
RATES = plain_rates((1, 101), (1e-3, 11e-3), disk_bytes_per_s=100.0)


def device(id: str, memory_bytes: int, rates: ComputeRates | None = RATES) -> DeviceSpec:
    return DeviceSpec(id=id, name=id, memory_bytes=memory_bytes, threads=1, rates=rates)


GPU = replace(device("a", 1), host_memory_bytes=0)


def alone(streamed_layers: int) -> Plan:
    shard = Shard(
        device="a",
        heads=range(4),
        ffn_columns=range(8),
        vocab=range(10),
        streamed_layers=streamed_layers,
    )
    return Plan(model="m", version=1, stages=(Stage(layers=range(LAYERS), shards=(shard,)),))


def with_kept(plan: Plan, experts: int) -> Plan:
    (stage,) = plan.stages
    shard = stage.slices[0].keeping(experts)
    return replace(plan, stages=(replace(stage, shards=(shard,)),))


@pytest.mark.parametrize(
    ("streamed", "held", "read"),
    [
        (0, LAYERS, 0),
        (WINDOW_LAYERS, LAYERS, 0),  # the window holds all of them
        (4, LAYERS - 4 + WINDOW_LAYERS, 4),
        (9, 1 + WINDOW_LAYERS, 9),
        (10, 2, 10),  # the least: one is used while the other is filled
    ],
)
def test_a_window_stays_and_the_others_are_read(streamed: int, held: int, read: int) -> None:
    use = memory_use(alone(streamed), MODEL, WORKLOAD)["a"]
    embedding_bytes = 0 if streamed else EMBEDDING_BYTES  # which a token needs a row of
    assert use.weight_bytes == held * MATRIX_BYTES + LAYERS * 20 + HEAD_BYTES + embedding_bytes
    assert use.kv_bytes == KV_BYTES
    assert use.streamed_bytes == read * MATRIX_BYTES


def test_a_step_waits_for_what_the_disk_does_not_bring_meanwhile() -> None:
    cluster = ClusterSpec(devices=(device("a", 10**6),))
    whole = estimate(alone(0), MODEL, cluster, WORKLOAD)
    compute_s = (LAYERS * 150 + 10 * 3) * 1e-3
    assert whole.token_s == pytest.approx(compute_s)
    streamed = estimate(alone(5), MODEL, cluster, WORKLOAD)
    disk_s = 5 * MATRIX_BYTES / 100
    assert streamed.token_s == pytest.approx(disk_s)
    (load,) = [term for term in streamed.terms if term.kind == "load"]
    assert load.seconds == pytest.approx(disk_s - compute_s)
    assert streamed.bottleneck == "reading weights from the disk of a: 4,970 ms of 6,500 ms"


@pytest.mark.parametrize(
    ("reserved_tokens", "buffer_bytes", "host_memory_bytes", "read"),
    [
        (11, 0, None, 8),  # one request has all of its tokens
        (11 + 13, 0, None, 6),  # 20 bytes a token: 260 hold two layers of 130
        (11 + 13, 129, None, 6),
        (11 + 13, 130, None, 5),
        (11, 6 * MATRIX_BYTES, None, 0),  # two are left, which the window holds
        (11 + 13, 130, 0, 8),  # the memory of a GPU
    ],
)
def test_decoding_leaves_memory_to_layers_from_disk(
    reserved_tokens: int, buffer_bytes: int, host_memory_bytes: int | None, read: int
) -> None:
    """A prompt is read as without it."""
    plain = replace(device("a", 10**6), host_memory_bytes=host_memory_bytes)
    lends = replace(plain, unused_buffer_bytes=buffer_bytes)
    workload = replace(WORKLOAD, reserved_tokens=reserved_tokens)
    without = estimate(alone(8), MODEL, ClusterSpec(devices=(plain,)), WORKLOAD)
    found = estimate(alone(8), MODEL, ClusterSpec(devices=(lends,)), workload)
    assert found.first_token_s == pytest.approx(without.first_token_s)
    assert sum(term.count for term in found.terms if term.kind in ("load", "copy")) == read


def test_a_disk_that_keeps_up_costs_nothing() -> None:
    fast = replace(RATES, disk_bytes_per_s=1e9)
    cluster = ClusterSpec(devices=(device("a", 10**6, fast),))
    assert estimate(alone(9), MODEL, cluster, WORKLOAD).token_s == pytest.approx(
        estimate(alone(0), MODEL, cluster, WORKLOAD).token_s
    )


@pytest.mark.parametrize(
    ("host_layers", "copy_bytes_per_s", "kind", "seconds"),
    [
        (9, 200.0, "copy", 9 * MATRIX_BYTES / 200),  # the host holds all of them
        (0, 200.0, "load", 9 * MATRIX_BYTES / 100),
        (6, 50.0, "copy", 9 * MATRIX_BYTES / 50),
        (6, 1e9, "load", 6 * MATRIX_BYTES / 100),  # three stay, beside three in passing
        (9, None, "nothing", 0.0),  # some rate that any link has
    ],
)
def test_a_gpu_waits_for_its_link_or_for_the_disk(
    host_layers: int, copy_bytes_per_s: float | None, kind: str, seconds: float
) -> None:
    rates = replace(RATES, copy_bytes_per_s=copy_bytes_per_s)
    gpu = replace(device("a", 10**6, rates), host_memory_bytes=host_layers * MATRIX_BYTES)
    cluster = ClusterSpec(devices=(gpu,))
    found = estimate(alone(9), MODEL, cluster, WORKLOAD)
    compute_s = (LAYERS * 150 + 10 * 3) * 1e-3
    loads: list[tuple[str, Any]] = [
        (t.kind, t.seconds) for t in found.terms if t.kind in {"load", "copy"}
    ]
    waited_s = max(0.0, seconds - compute_s)
    assert loads == ([(kind, pytest.approx(waited_s))] if waited_s else [])
    assert found.token_s == pytest.approx(max(compute_s, seconds))


def test_a_plan_says_where_layers_come_from() -> None:
    gpu = replace(device("a", 10**6), host_memory_bytes=6 * MATRIX_BYTES)
    (row,) = describe(alone(9), MODEL, ClusterSpec(devices=(gpu,)), WORKLOAD)
    assert (row.streamed_layers, row.host_layers) == (9, 3)
    (row,) = describe(alone(9), MODEL, ClusterSpec(devices=(device("a", 10**6),)), WORKLOAD)
    assert (row.streamed_layers, row.host_layers) == (9, 0)
    (row,) = describe(alone(2), MODEL, ClusterSpec(devices=(gpu,)), WORKLOAD)
    assert (row.streamed_layers, row.host_layers) == (2, 0), "the window holds both"


def test_a_gpu_is_brought_all_experts_and_a_cpu_those_that_are_needed() -> None:
    sparse = changed_facts(MODEL, num_experts=5, top_k=1, expert_column_bytes=1)
    cpu = device("a", 10**6)
    gpu = replace(cpu, host_memory_bytes=0)
    of_cpu, of_gpu = (
        describe(alone(9), sparse, ClusterSpec(devices=(each,)), WORKLOAD)[0].memory
        for each in (cpu, gpu)
    )
    assert 0 < of_cpu.routed_bytes < of_cpu.streamed_bytes < 9 * MATRIX_BYTES
    assert (of_gpu.routed_bytes, of_gpu.streamed_bytes) == (0, 9 * MATRIX_BYTES)
    use = memory_use(alone(9), sparse, WORKLOAD)
    load = loads_of(alone(9), ClusterSpec(devices=(gpu,)), use)["a"]
    assert load.disk_s == pytest.approx(9 * MATRIX_BYTES / 100)
    assert load.routed_s == 0


def test_a_gpu_has_room_for_all_experts_of_its_window_and_a_cpu_for_few() -> None:
    all_experts = NUM_EXPERTS * EXPERT_BYTES
    use = memory_use(alone(LAYERS), SPARSE, WORKLOAD)["a"]
    assert use.weight_bytes < all_experts
    cpu = device("a", 10**12)
    gpu = replace(cpu, host_memory_bytes=0)
    assert use.on(cpu) == use
    assert use.on(gpu).weight_bytes > WINDOW_LAYERS * all_experts
    assert use.on(gpu).total == use.total + use.apart_bytes
    for each, fits in ((cpu, True), (gpu, False)):
        small = ClusterSpec(devices=(replace(each, memory_bytes=use.total),))
        with nullcontext() if fits else pytest.raises(CapacityError):
            check_fit(alone(LAYERS), SPARSE, small, WORKLOAD)


def test_what_is_too_little_for_a_layer_holds_experts() -> None:
    least = memory_use(alone(LAYERS), SPARSE, WORKLOAD)["a"]
    layer_bytes = least.streamed_layer_bytes
    for memory_bytes in range(least.total, least.total + 3 * layer_bytes, layer_bytes // 7):
        cluster = ClusterSpec(devices=(device("a", memory_bytes),))
        plan = choose(SPARSE, cluster, WORKLOAD, stream=True).plan
        assert (
            0 <= memory_bytes - memory_use(plan, SPARSE, WORKLOAD)["a"].total < least.expert_bytes
        )
        assert Plan.from_json(plan.to_json()) == plan
        shard = plan.stages[0].slices[0]
        assert shard.kept_experts < NUM_EXPERTS
        assert shard.streaming(shard.streamed_layers) == shard
        assert shard.streaming(LAYERS - 4).kept_experts == 0


def test_a_gpu_keeps_no_experts_beside_the_layers_that_stay() -> None:
    kept = with_kept(alone(LAYERS), 3)
    for each, more in ((device("a", 1), 3 * EXPERT_PLACE_BYTES), (GPU, 0)):
        plain, filled = (
            memory_use(plan, SPARSE, WORKLOAD)["a"].on(each).total for plan in (alone(LAYERS), kept)
        )
        assert filled - plain == more


def test_no_more_experts_are_kept_than_there_are() -> None:
    everything = LAYERS * NUM_EXPERTS
    with_kept(alone(LAYERS), everything).validate(SPARSE, None)
    with pytest.raises(PlanError, match=f"keeps {everything + 1} experts, and the stage has"):
        with_kept(alone(LAYERS), everything + 1).validate(SPARSE, None)


def test_decoding_leaves_memory_to_experts_from_disk() -> None:
    cpu = device("a", 10**12, replace(RATES, disk_bytes_per_s=1.0))
    lends = replace(cpu, unused_buffer_bytes=3 * EXPERT_PLACE_BYTES)
    lent, kept = (
        estimate(plan, SPARSE, ClusterSpec(devices=(each,)), WORKLOAD).token_s
        for plan, each in ((alone(LAYERS), lends), (with_kept(alone(LAYERS), 3), cpu))
    )
    without = estimate(alone(LAYERS), SPARSE, ClusterSpec(devices=(cpu,)), WORKLOAD).token_s
    assert lent == kept < without


def test_experts_that_were_found_in_memory_are_not_read() -> None:
    of_token = LAYERS * 2 * EXPERT_BYTES

    def routed(hits: float | None, streamed: int = LAYERS) -> int:
        workload = replace(WORKLOAD, expert_hits=hits)
        return memory_use(alone(streamed), SPARSE, workload)["a"].routed_bytes

    assert routed(0.75) == pytest.approx(of_token / 4, rel=1e-6)
    assert routed(1.0) == 0
    assert routed(0.75) < (routed(None) or 0) < of_token
    assert routed(0.75, streamed=0) == 0
    few = memory_use(alone(1), SPARSE, WORKLOAD)
    assert 0 < few["a"].streamed_bytes == few["a"].routed_bytes
    load = loads_of(alone(1), ClusterSpec(devices=(device("a", 10**12),)), few)["a"]
    assert load.disk_s == load.routed_s == few["a"].routed_bytes / 100


@pytest.mark.parametrize("expert_s", [None, 11.0])
def test_each_expert_that_a_token_goes_through_is_a_graph_of_its_own(
    expert_s: float | None,
) -> None:
    """Where others are on disk, though all are found in memory. What that takes is measured, or as
    any run of a graph."""
    sparse = changed_facts(MODEL, num_experts=5, top_k=2, expert_column_bytes=1)
    found = replace(WORKLOAD, expert_hits=1.0)
    run_s = 7.0
    cpu = device("a", 10**6, replace(RATES, run_s=run_s, expert_s=expert_s))
    cluster = ClusterSpec(devices=(cpu,))
    use = memory_use(alone(5), sparse, found)["a"]
    assert use.expert_runs == pytest.approx(2 * LAYERS)
    assert use.on(replace(cpu, host_memory_bytes=0)).expert_runs == 0
    whole, streamed = (estimate(alone(count), sparse, cluster, found) for count in (0, 5))
    assert streamed.token_s - whole.token_s == pytest.approx(2 * LAYERS * (expert_s or run_s))
    assert memory_use(alone(0), sparse, found)["a"].expert_runs == 0
    assert memory_use(alone(5), MODEL, found)["a"].expert_runs == 0
    with pytest.raises(ValueError, match=r"expert_hits are 1\.5"):
        replace(WORKLOAD, expert_hits=1.5)


@pytest.mark.parametrize("rates", [RATES, None])
def test_streams_only_when_asked_and_as_little_as_possible(rates: ComputeRates | None) -> None:
    def choice(memory_bytes: int, *, stream: bool) -> int:
        cluster = ClusterSpec(devices=(device("a", memory_bytes, rates),))
        plan = choose(MODEL, cluster, WORKLOAD, stream=stream).plan
        assert memory_use(plan, MODEL, WORKLOAD)["a"].total <= memory_bytes
        return plan.stages[0].slices[0].streamed_layers

    assert choice(WHOLE_BYTES, stream=True) == 0
    with pytest.raises(CapacityError):
        choice(WHOLE_BYTES - 1, stream=False)
    assert choice(WHOLE_BYTES - EMBEDDING_BYTES, stream=True) == 1  # it is enough by itself
    assert choice(WHOLE_BYTES - EMBEDDING_BYTES - 1, stream=True) == WINDOW_LAYERS + 1
    assert choice(WHOLE_BYTES - 3 * MATRIX_BYTES, stream=True) == WINDOW_LAYERS + 3
    with pytest.raises(CapacityError):
        choice(HEAD_BYTES, stream=True)


def test_two_devices_that_stream_half_each_beat_one() -> None:
    """Their disks read at the same time."""
    model = changed_facts(MODEL, num_layers=20)
    memory_bytes = 1400  # of 3,140 in all, of which one device needs 1,060 at least
    one = ClusterSpec(devices=(device("a", memory_bytes),))
    two = ClusterSpec(devices=(device("a", memory_bytes), device("b", memory_bytes)))
    slow = choose(model, one, WORKLOAD, stream=True)
    fast = choose(model, two, WORKLOAD, stream=True)
    assert slow.predicted is not None
    assert fast.predicted is not None
    assert len(fast.plan.devices) == 2
    assert slow.predicted.tokens_per_s * 1.5 < fast.predicted.tokens_per_s
    assert "from disk" in describe_plan_in_words(fast.plan, two)
    assert fast.plan == choose(model, two, WORKLOAD, stream=True).plan


def test_a_device_that_computes_only_from_memory_gets_no_layer_from_disk() -> None:
    small = replace(device("a", WHOLE_BYTES // 2), streams=False)
    with pytest.raises(CapacityError):
        choose(MODEL, ClusterSpec(devices=(small,)), WORKLOAD, stream=True)
    large = device("b", WHOLE_BYTES * 3 // 4, None)
    both = ClusterSpec(devices=(replace(small, rates=None), large))
    plan = choose(MODEL, both, WORKLOAD, parallel="pipeline", stream=True).plan
    for stage in plan.stages:
        (shard,) = stage.slices
        assert not (shard.device == "a" and shard.streamed_layers)


def test_is_written_and_read_and_checked() -> None:
    plan = alone(4)
    assert Plan.from_json(plan.to_json()) == plan
    value = plan.to_json()
    del value["stages"][0]["shards"][0]["streamed_layers"]  # type: ignore[index]
    assert Plan.from_json(value) == alone(0)
    with pytest.raises(PlanError, match="streams 11 layers, and the stage has 10"):
        alone(11).validate(MODEL, None)


def test_reading_from_disk_beats_a_bad_link() -> None:
    """Both have the memory together; alone each would read a little for every token."""
    memory_bytes = WHOLE_BYTES - EMBEDDING_BYTES - MATRIX_BYTES
    devices = (device("a", memory_bytes), device("b", memory_bytes))
    links = tuple(
        LinkSpec(source=source, target=target, latency_s=60.0, bytes_per_s=1e6)
        for source, target in (("a", "b"), ("b", "a"))
    )
    cluster = ClusterSpec(devices=devices, links=links)
    together = choose(MODEL, cluster, WORKLOAD)
    alone = choose(MODEL, cluster, WORKLOAD, stream=True)
    assert (len(together.plan.devices), together.solo) == (2, None)
    assert len(alone.plan.devices) == 1
    assert alone.solo is not None
    assert alone.solo.estimate == alone.predicted
    assert together.plan in [plan for plan, _ in alone.runners_up]
    near = replace(cluster, links=tuple(replace(link, latency_s=1e-6) for link in links))
    assert choose(MODEL, near, WORKLOAD, stream=True).plan == choose(MODEL, near, WORKLOAD).plan
