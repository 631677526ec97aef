"""Bytes by hand: what `memory_use`, `check_fit` and `describe` say of small plans."""

import pytest

from edge.partition import (
    CapacityError,
    ClusterSpec,
    DeviceSpec,
    MemoryUse,
    Plan,
    PlanError,
    Shard,
    Stage,
    Workload,
    check_fit,
    describe,
    memory_use,
)
from tests.support.facts import changed_facts, plain_facts

MODEL = plain_facts(
    name="tiny",
    num_layers=6,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    ffn_columns=96,
    vocab_size=100,
    tied_embeddings=True,
    column_multiple=32,
    query_head_bytes=1_000,
    kv_head_bytes=10_000,
    ffn_column_bytes=100,
    layer_bytes=1,
    embedding_row_bytes=7,
    head_row_bytes=3,
    kv_bytes_per_token=2,
)
WORKLOAD = Workload(prompt_tokens=8, output_tokens=2, concurrency=5)  # 50 tokens in the cache
PLAN = Plan(
    model="tiny",
    version=1,
    stages=(
        Stage(
            layers=range(0, 2),
            shards=(
                # 6 heads straddle 2 groups of 4: KV heads (0, 0, 1).
                Shard(device="a", heads=range(6), ffn_columns=range(32), vocab=range(100)),
                Shard(device="b", heads=range(6, 8), ffn_columns=range(32, 96), vocab=range(0)),
            ),
        ),
        Stage(
            layers=range(2, 6),
            shards=(Shard(device="c", heads=range(8), ffn_columns=range(96), vocab=range(100)),),
        ),
    ),
)
USE = {
    "a": MemoryUse(weight_bytes=2 * (6_000 + 30_000 + 3_200 + 1) + 700, kv_bytes=2 * 3 * 2 * 50),
    "b": MemoryUse(weight_bytes=2 * (2_000 + 10_000 + 6_400 + 1), kv_bytes=2 * 1 * 2 * 50),
    "c": MemoryUse(weight_bytes=4 * (8_000 + 20_000 + 9_600 + 1) + 300, kv_bytes=4 * 2 * 2 * 50),
}


def cluster(**memory_bytes: int) -> ClusterSpec:
    return ClusterSpec(
        devices=tuple(
            DeviceSpec(id=id, name=f"{id} name", memory_bytes=size, threads=1)
            for id, size in memory_bytes.items()
        )
    )


def test_memory_use() -> None:
    use = memory_use(PLAN, MODEL, WORKLOAD)
    assert use == USE
    assert list(use) == ["a", "b", "c"]
    assert use["b"].total == 2 * 18_401 + 200


def test_one_stage_holds_both_embedding_and_head_even_when_tied() -> None:
    shard = Shard(device="a", heads=range(8), ffn_columns=range(96), vocab=range(100))
    plan = Plan(model="tiny", version=1, stages=(Stage(layers=range(6), shards=(shard,)),))
    assert memory_use(plan, MODEL, WORKLOAD)["a"].weight_bytes == 6 * 37_601 + 1_000


def test_a_shard_without_heads_needs_no_cache() -> None:
    shards = (
        Shard(device="a", heads=range(8), ffn_columns=range(0), vocab=range(0)),
        Shard(device="b", heads=range(0), ffn_columns=range(96), vocab=range(100)),
    )
    plan = Plan(model="tiny", version=1, stages=(Stage(layers=range(6), shards=shards),))
    assert memory_use(plan, MODEL, WORKLOAD)["b"].kv_bytes == 0


def test_memory_of_a_wrong_plan_is_not_counted() -> None:
    other = changed_facts(MODEL, num_layers=7)
    with pytest.raises(PlanError, match="layers end at 6, and the model has 7"):
        memory_use(PLAN, other, WORKLOAD)


def test_check_fit_to_the_byte() -> None:
    exact = {id: use.total for id, use in USE.items()}
    check_fit(PLAN, MODEL, cluster(**exact), WORKLOAD)
    with pytest.raises(CapacityError) as caught:
        check_fit(PLAN, MODEL, cluster(**exact | {"b": exact["b"] - 1}), WORKLOAD)
    assert (caught.value.device, caught.value.missing_bytes) == ("b", 1)
    assert caught.value.largest_context_tokens == 9
    assert str(caught.value) == (
        "The model does not fit: 'b name' lacks 1 byte. What helps: that much more"
        " memory, or a smaller dtype for the weights, or at most 9 context tokens per request"
        " instead of 10."
    )


def test_check_fit_names_everyone_and_the_worst_first() -> None:
    with pytest.raises(CapacityError) as caught:
        check_fit(PLAN, MODEL, cluster(a=79_181, b=50_000, c=10), WORKLOAD)
    error = caught.value
    assert {shortage.device: shortage.missing_bytes for shortage in error.shortages} == {
        "a": USE["a"].total - 79_181,
        "c": USE["c"].total - 10,
    }
    assert (error.device, error.missing_bytes) == ("c", USE["c"].total - 10)
    # No context is short enough for the weights of c, so none is offered.
    assert error.largest_context_tokens is None
    assert "context" not in str(error)
    assert "lacks 147.9 KiB (151,494 bytes)." in str(error)


def test_check_fit_of_a_wrong_plan_tells_what_is_short_besides() -> None:
    """c is not there, and a has too little."""
    with pytest.raises(PlanError) as caught:
        check_fit(PLAN, MODEL, cluster(a=USE["a"].total - 5, b=50_000), WORKLOAD)
    assert any("'c'" in problem for problem in caught.value.problems)
    assert "'a name' lacks 5 bytes." in caught.value.problems


def test_check_fit_of_a_wrong_plan_says_so() -> None:
    with pytest.raises(PlanError, match="'c' of stage 1, shard 0 is not in the cluster"):
        check_fit(PLAN, MODEL, cluster(a=10**6, b=10**6), WORKLOAD)


def test_describe_has_a_row_for_each_shard() -> None:
    rows = describe(PLAN, MODEL, cluster(c=100, b=40_000, a=10**6), WORKLOAD)
    assert [(row.device, row.name, row.stage, row.layers) for row in rows] == [
        ("a", "a name", 0, range(0, 2)),
        ("b", "b name", 0, range(0, 2)),
        ("c", "c name", 1, range(2, 6)),
    ]
    assert [row.memory for row in rows] == list(USE.values())
    assert [row.left_bytes for row in rows] == [10**6 - 79_702, 40_000 - 37_002, 100 - 151_504]
    (held,) = rows[1].held
    assert (held.heads, held.ffn_columns, rows[1].vocab) == (
        range(6, 8),
        range(32, 96),
        range(0),
    )
    assert [(held.kv_heads, held.kv_copies) for row in rows for held in row.held] == [
        ((0, 0, 1), 1),  # its own 0 again
        ((1,), 1),  # which a holds, too
        ((0, 1), 0),
    ]


def test_describe_of_a_wrong_plan_says_so() -> None:
    with pytest.raises(PlanError, match="not in the cluster"):
        describe(PLAN, MODEL, cluster(a=1), WORKLOAD)
