"""Models whose layers are of several kinds: what plans promise holds for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    ClusterSpec,
    DeviceSpec,
    LayerFacts,
    ModelFacts,
    Parallel,
    Plan,
    PlanError,
    Workload,
    check_fit,
    choose,
    describe,
    estimate,
    kv_heads,
    memory_use,
)
from edge.partition.search.arrangements import all_arrangements
from edge.partition.search.branch_and_bound import Search
from edge.partition.search.situation import Situation
from tests.property.measured_situations import rates
from tests.property.plan_situations import PLANS, parallels, whole_bytes, with_more, workloads


@st.composite
def layers(draw: st.DrawFn) -> LayerFacts:
    num_kv_heads = draw(st.integers(1, 3))
    return LayerFacts(
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        ffn_columns=draw(st.integers(1, 40)),
        query_head_bytes=draw(st.integers(0, 50)),
        kv_head_bytes=draw(st.integers(0, 50)),
        ffn_column_bytes=draw(st.integers(0, 20)),
        layer_bytes=draw(st.integers(0, 20)),
        kv_bytes_per_token=draw(st.integers(0, 5)),
    )


@st.composite
def unlike_models(draw: st.DrawFn) -> ModelFacts:
    kinds = draw(st.lists(layers(), min_size=2, max_size=3))
    more = draw(st.lists(st.integers(0, len(kinds) - 1), max_size=4))
    return ModelFacts(
        name="unlike",
        hidden_size=draw(st.integers(1, 99)),
        vocab_size=draw(st.integers(8, 40)),
        kinds=tuple(kinds),
        layers=tuple(draw(st.permutations([*range(len(kinds)), *more]))),
        tied_embeddings=False,
        column_multiple=draw(st.sampled_from((1, 3, 16))),
        embedding_row_bytes=draw(st.integers(0, 20)),
        head_row_bytes=draw(st.integers(0, 20)),
    )


@st.composite
def unlike_situations(draw: st.DrawFn) -> tuple[ModelFacts, ClusterSpec, Workload]:
    """Memory between too little and plenty; all devices measured, or none."""
    model, workload = draw(unlike_models()), draw(workloads)
    whole = whole_bytes(model, workload)
    count = draw(st.integers(1, 3))
    is_measured = draw(st.booleans())
    devices = tuple(
        DeviceSpec(
            id=f"d{number}",
            name=f"d{number}",
            memory_bytes=whole * draw(st.integers(10, 160)) // 100,
            threads=draw(st.integers(1, 4)),
            rates=draw(rates()) if is_measured else None,
        )
        for number in range(count)
    )
    return model, ClusterSpec(devices=devices), workload


def planned(model: ModelFacts, cluster: ClusterSpec, workload: Workload, way: Parallel) -> Plan:
    return choose(model, cluster, workload, parallel=way).plan


@PLANS
@given(unlike_situations(), parallels)
def test_a_plan_is_valid_and_fits_and_its_memory_adds_up(
    situation: tuple[ModelFacts, ClusterSpec, Workload], parallel: Parallel
) -> None:
    model, cluster, workload = situation
    try:
        plan = planned(model, cluster, workload, parallel)
    except CapacityError as error:
        cluster = with_more(cluster, error) if cluster.devices[0].rates is None else cluster
        assume(cluster is not situation[1])
        plan = planned(model, cluster, workload, parallel)
    except PlanError:
        assume(False)
        raise
    plan.validate(model, cluster)
    check_fit(plan, model, cluster, workload)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(row.left_bytes >= 0 for row in describe(plan, model, cluster, workload))
    tokens = workload.cached_tokens
    twice = 0
    for stage in plan.stages:
        for number, (facts, count) in enumerate(model.count(stage.layers)):
            held = [
                head
                for shard in stage.slices
                for head in kv_heads(shard.slice(number).heads, facts.num_heads, facts.num_kv_heads)
            ]
            head_bytes = facts.kv_head_bytes + tokens * facts.kv_bytes_per_token
            twice += count * (len(held) - facts.num_kv_heads) * head_bytes
            twice += count * (len(stage.shards) - 1) * facts.layer_bytes
    use = memory_use(plan, model, workload)
    assert sum(one.total for one in use.values()) == whole_bytes(model, workload) + twice


@settings(PLANS, max_examples=25)  # each of all arrangements
@given(unlike_situations())
def test_no_arrangement_beats_its_bound_and_takes_what_the_search_says(
    facts: tuple[ModelFacts, ClusterSpec, Workload],
) -> None:
    model, cluster, workload = facts
    assume(cluster.devices[0].rates is not None)
    search = Search(Situation(model, cluster, workload, 256))
    for arrangement in all_arrangements(range(len(cluster.devices))):
        if len(arrangement) > model.num_layers:
            continue
        solved = search.solve(arrangement)
        if solved is None:
            continue
        assert search.bound_s(arrangement) <= solved.total_s * (1 + 1e-9)
        plan = search.plan(solved)
        check_fit(plan, model, cluster, workload)
        told = estimate(plan, model, cluster, workload).total_s(workload)
        assert told == pytest.approx(solved.total_s, rel=1e-9)


@PLANS
@given(unlike_situations(), parallels)
def test_kinds_that_are_alike_in_all_that_counts_are_planned_as_one(
    situation: tuple[ModelFacts, ClusterSpec, Workload], parallel: Parallel
) -> None:
    """As layers that differ in their windows only."""
    model, cluster, workload = situation
    alike = replace(model, kinds=(model.kinds[0],) * len(model.kinds))
    uniform = replace(alike, kinds=model.kinds[:1], layers=(0,) * model.num_layers)
    try:
        expected = planned(uniform, cluster, workload, parallel)
    except (CapacityError, PlanError) as error:
        with pytest.raises(type(error)):
            planned(alike, cluster, workload, parallel)
        return
    plan = planned(alike, cluster, workload, parallel)
    assert plan == expected
    plan.validate(alike, cluster)
