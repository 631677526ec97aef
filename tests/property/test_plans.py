"""Solved plans hold what they promise, and small ones are compared with every other choice."""

import copy
import dataclasses
import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    ClusterSpec,
    DeviceSpec,
    ModelFacts,
    Parallel,
    PlanError,
    Workload,
    check_fit,
    choose,
    describe,
    kv_heads,
    memory_use,
)
from tests.property.plan_situations import (
    PLANS,
    Situation,
    models,
    parallels,
    situations,
    solved,
    whole_bytes,
    with_more,
    workloads,
)
from tests.support.facts import facts_of


@PLANS
@given(situations(), parallels)
def test_a_solved_plan_is_valid_and_fits(situation: Situation, parallel: Parallel) -> None:
    model, cluster, workload = situation
    if parallel == "pipeline" and len(cluster.devices) > model.num_layers:
        with pytest.raises(PlanError, match=f"Use at most {model.num_layers} devices"):
            choose(model, cluster, workload, parallel=parallel)
        return
    try:
        plan = choose(model, cluster, workload, parallel=parallel).plan
    except CapacityError as error:
        # What was asked for is enough.
        cluster = with_more(cluster, error)
        plan = choose(model, cluster, workload, parallel=parallel).plan
    plan.validate(model, cluster)
    check_fit(plan, model, cluster, workload)
    assert all(row.left_bytes >= 0 for row in describe(plan, model, cluster, workload))
    ids = [device.id for device in cluster.devices]
    if parallel == "auto":
        assert [id for id in ids if id in plan.devices] == list(plan.devices)
    else:
        assert list(plan.devices) == ids


@PLANS
@given(situations(), parallels)
def test_the_offered_context_is_the_longest_that_fits(
    situation: Situation, parallel: Parallel
) -> None:
    model, cluster, workload = situation
    try:
        choose(model, cluster, workload, parallel=parallel)
    except PlanError:
        return
    except CapacityError as error:
        longest = error.largest_context_tokens
    else:
        return
    if longest is not None:
        assert 1 <= longest < workload.context_tokens
        shorter = dataclasses.replace(workload, prompt_tokens=longest, output_tokens=0)
        choose(model, cluster, shorter, parallel=parallel)
    longer = dataclasses.replace(workload, prompt_tokens=(longest or 0) + 1, output_tokens=0)
    with pytest.raises(CapacityError):
        choose(model, cluster, longer, parallel=parallel)


@PLANS
@given(situations(), parallels)
def test_the_same_facts_give_the_same_plan(situation: Situation, parallel: Parallel) -> None:
    plan = solved(situation, parallel)
    assert solved(copy.deepcopy(situation), parallel) == plan


@PLANS
@given(situations(), parallels)
def test_memory_adds_up_to_the_model_and_what_is_held_more_than_once(
    situation: Situation, parallel: Parallel
) -> None:
    model, _, workload = situation
    plan = solved(situation, parallel)
    tokens = (workload.prompt_tokens + workload.output_tokens) * workload.concurrency
    kv_head = facts_of(model).kv_head_bytes + tokens * facts_of(model).kv_bytes_per_token
    twice = 0
    for stage in plan.stages:
        held = [
            head
            for shard in stage.slices
            for head in kv_heads(
                shard.heads, facts_of(model).num_heads, facts_of(model).num_kv_heads
            )
        ]
        assert set(held) == set(range(facts_of(model).num_kv_heads))
        twice += len(stage.layers) * (len(held) - facts_of(model).num_kv_heads) * kv_head
        twice += len(stage.layers) * (len(stage.shards) - 1) * facts_of(model).layer_bytes
    use = memory_use(plan, model, workload)
    assert sum(one.total for one in use.values()) == whole_bytes(model, workload) + twice


def layer_counts(total: int, parts: int) -> list[tuple[int, ...]]:
    return [
        counts
        for counts in itertools.product(range(1, total + 1), repeat=parts)
        if sum(counts) == total
    ]


def pipeline_fits(
    model: ModelFacts, devices: tuple[DeviceSpec, ...], counts: tuple[int, ...], workload: Workload
) -> bool:
    tokens = workload.context_tokens * workload.concurrency
    layer = (
        facts_of(model).num_heads * facts_of(model).query_head_bytes
        + facts_of(model).num_kv_heads
        * (facts_of(model).kv_head_bytes + tokens * facts_of(model).kv_bytes_per_token)
        + facts_of(model).ffn_columns * facts_of(model).ffn_column_bytes
        + facts_of(model).layer_bytes
    )
    needed = [count * layer for count in counts]
    needed[0] += model.vocab_size * model.embedding_row_bytes
    needed[-1] += model.vocab_size * model.head_row_bytes
    return all(bytes <= device.memory_bytes for bytes, device in zip(needed, devices, strict=True))


@PLANS
@given(situations(most_layers=6, most_devices=4))
def test_no_pipeline_is_better(situation: Situation) -> None:
    model, cluster, workload = situation
    devices = cluster.devices
    assume(len(devices) <= model.num_layers)

    def loads(counts: tuple[int, ...]) -> list[Fraction]:
        """Layers per thread, the slowest stage first."""
        pairs = zip(counts, devices, strict=True)
        return sorted((Fraction(count, device.threads) for count, device in pairs), reverse=True)

    possible = [
        loads(counts)
        for counts in layer_counts(model.num_layers, len(devices))
        if pipeline_fits(model, devices, counts, workload)
    ]
    if not possible:
        with pytest.raises(CapacityError):
            choose(model, cluster, workload, parallel="pipeline")
        return
    plan = choose(model, cluster, workload, parallel="pipeline").plan
    # Not only is the slowest stage as fast as can be, so are all others after it.
    assert loads(tuple(len(stage.layers) for stage in plan.stages)) == min(possible)


@PLANS
@given(situations(most_layers=4, most_devices=5))
def test_no_smaller_choice_of_devices_would_do(
    situation: Situation,
) -> None:
    model, cluster, workload = situation
    fitting: dict[int, list[tuple[DeviceSpec, ...]]] = {}
    for size in range(1, min(len(cluster.devices), model.num_layers) + 1):
        fitting[size] = [
            chosen
            for chosen in itertools.combinations(cluster.devices, size)
            if any(
                pipeline_fits(model, chosen, counts, workload)
                for counts in layer_counts(model.num_layers, size)
            )
        ]
    fewest = next((size for size, choices in fitting.items() if choices), None)
    if fewest is None:
        with pytest.raises(CapacityError):
            choose(model, cluster, workload)
        return
    plan = choose(model, cluster, workload).plan
    assert len(plan.stages) == len(plan.devices) == fewest
    used = tuple(cluster.device(id) for id in plan.devices)
    assert used in fitting[fewest]
    if fewest == 1:
        assert used[0].threads == max(choice[0].threads for choice in fitting[1])
    else:
        most = max(sum(one.memory_bytes for one in choice) for choice in fitting[fewest])
        assert sum(device.memory_bytes for device in used) == most


@PLANS
@given(models(), workloads, st.lists(st.integers(1, 16), min_size=1, max_size=8))
def test_tensor_follows_threads_when_memory_is_plenty(
    model: ModelFacts, workload: Workload, threads: list[int]
) -> None:
    cluster = ClusterSpec(
        devices=tuple(
            DeviceSpec(id=f"d{index}", name="d", memory_bytes=10**9, threads=count)
            for index, count in enumerate(threads)
        )
    )
    (stage,) = choose(model, cluster, workload, parallel="tensor").plan.stages
    for shard, count in zip(stage.slices, threads, strict=True):
        quota = Fraction(count, sum(threads))
        # Largest remainders: off by less than one unit, by the rest of columns at the end, and by
        # the row that keeps a device from standing idle (which another one gives).
        assert abs(len(shard.vocab) - quota * model.vocab_size) < len(threads) + 1
        off = abs(len(shard.ffn_columns) - quota * facts_of(model).ffn_columns)
        assert off < 2 * model.column_multiple + 1
