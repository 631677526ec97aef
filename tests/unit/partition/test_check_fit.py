"""Plans for devices one can picture, and what is said when there is none."""

import itertools

import pytest

from edge.partition import (
    CapacityError,
    ClusterSpec,
    DeviceSpec,
    Plan,
    PlanError,
    Workload,
    check_fit,
    choose,
    describe,
    kv_heads,
    memory_use,
)
from tests.support.facts import changed_facts, plain_facts

# A layer weighs 1,000 bytes in all (80 heads, 120 KV heads and cache, 768 columns, 32 the rest).
MODEL = plain_facts(
    name="tiny",
    num_layers=12,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    ffn_columns=96,
    vocab_size=100,
    tied_embeddings=False,
    column_multiple=32,
    query_head_bytes=10,
    kv_head_bytes=10,
    ffn_column_bytes=8,
    layer_bytes=32,
    embedding_row_bytes=4,
    head_row_bytes=2,
    kv_bytes_per_token=1,
)
WORKLOAD = Workload(prompt_tokens=20, output_tokens=5, concurrency=2)
WHOLE_BYTES = 12 * 1000 + 100 * 6
HEAD_BYTES = 200


def cluster(*sizes: tuple[int, int]) -> ClusterSpec:
    """Devices a, b, c… from (memory_bytes, threads)."""
    return ClusterSpec(
        devices=tuple(
            DeviceSpec(id=id, name=id, memory_bytes=memory_bytes, threads=threads)
            for id, (memory_bytes, threads) in zip("abcdefghijkl", sizes, strict=False)
        )
    )


def layers(plan: Plan) -> list[tuple[str, int]]:
    return [(stage.slices[0].device, len(stage.layers)) for stage in plan.stages]


def heads(plan: Plan) -> list[int]:
    (stage,) = plan.stages
    return [len(shard.heads) for shard in stage.slices]


def test_one_device_alone_when_it_can_hold_everything() -> None:
    fits, not_quite = WHOLE_BYTES, WHOLE_BYTES - 1
    assert layers(choose(MODEL, cluster((not_quite, 64), (fits, 1)), WORKLOAD).plan) == [("b", 12)]


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        (((20_000, 2), (20_000, 4), (30_000, 2)), "b"),  # most threads
        (((20_000, 4), (30_000, 4), (25_000, 4)), "b"),  # then most memory
        (((20_000, 4), (20_000, 4)), "a"),  # then the smallest id
    ],
)
def test_the_best_of_several_that_can_hold_everything(
    sizes: tuple[tuple[int, int], ...], chosen: str
) -> None:
    assert choose(MODEL, cluster(*sizes), WORKLOAD).plan.devices == (chosen,)
    backwards = ClusterSpec(devices=cluster(*sizes).devices[::-1])
    assert choose(MODEL, backwards, WORKLOAD).plan.devices == (chosen,)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # Two suffice: those with the most memory, in the order of the cluster.
        (((5_000, 1), (7_000, 1), (8_000, 1)), [("b", 6), ("c", 6)]),
        (((8_000, 2), (2_000, 64), (7_000, 1)), [("a", 7), ("c", 5)]),
        # No two hold 12 layers, any three do.
        (((6_000, 1), (5_000, 1), (6_000, 1), (5_900, 1)), [("a", 4), ("c", 4), ("d", 4)]),
        # a has more memory than c, but as first stage it would need the embedding too.
        (((1_350, 9), (11_500, 1), (1_300, 1)), [("b", 11), ("c", 1)]),
    ],
)
def test_as_few_devices_as_possible(
    sizes: tuple[tuple[int, int], ...], expected: list[tuple[str, int]]
) -> None:
    plan = choose(MODEL, cluster(*sizes), WORKLOAD).plan
    assert layers(plan) == expected
    check_fit(plan, MODEL, cluster(*sizes), WORKLOAD)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (((20_000, 1),), [12]),
        (((20_000, 1), (20_000, 1), (20_000, 1)), [4, 4, 4]),
        (((20_000, 1), (20_000, 2), (20_000, 3)), [2, 4, 6]),
        (((20_000, 1), (20_000, 64)), [1, 11]),  # at least one layer each
        (((20_000, 1), (20_000, 5)), [2, 10]),
        (((20_000, 2), (20_000, 3), (20_000, 4)), [2, 4, 6]),  # 3, 4, 5 would be as fast at worst
        (((20_000, 1), (3_500, 64), (20_000, 3)), [2, 3, 7]),  # memory before threads
        (((2_400, 1), (20_000, 1)), [2, 10]),  # the embedding leaves a room for two layers
        (((2_399, 1), (20_000, 1)), [1, 11]),
        (((20_000, 1), (2_200, 1)), [10, 2]),  # the head likewise
        (((20_000, 1), (2_199, 1)), [11, 1]),
    ],
)
def test_pipeline_uses_every_device(
    sizes: tuple[tuple[int, int], ...], expected: list[int]
) -> None:
    plan = choose(MODEL, cluster(*sizes), WORKLOAD, parallel="pipeline").plan
    assert layers(plan) == list(zip("abc", expected, strict=False))
    assert plan.version == 1
    check_fit(plan, MODEL, cluster(*sizes), WORKLOAD)


def test_pipeline_puts_the_vocabulary_at_the_ends() -> None:
    plan = choose(MODEL, cluster(*[(20_000, 1)] * 3), WORKLOAD, parallel="pipeline").plan
    assert [len(stage.slices[0].vocab) for stage in plan.stages] == [100, 0, 100]


def test_pipeline_says_when_there_are_more_devices_than_layers() -> None:
    short = changed_facts(MODEL, num_layers=2)
    with pytest.raises(PlanError, match=r"3 devices cannot each hold a layer.*Use at most 2"):
        choose(short, cluster(*[(20_000, 1)] * 3), WORKLOAD, parallel="pipeline")
    assert (
        len(choose(short, cluster(*[(20_000, 1)] * 3), WORKLOAD, parallel="tensor").plan.devices)
        == 3
    )


def test_tensor_gives_equal_devices_equal_whole_groups() -> None:
    plan = choose(MODEL, cluster((20_000, 4), (20_000, 4)), WORKLOAD, parallel="tensor").plan
    (stage,) = plan.stages
    assert stage.layers == range(12)
    assert [shard.heads for shard in stage.slices] == [range(4), range(4, 8)]
    assert [shard.ffn_columns for shard in stage.slices] == [range(64), range(64, 96)]
    assert [shard.vocab for shard in stage.slices] == [range(50), range(50, 100)]


def test_tensor_follows_threads_in_whole_groups() -> None:
    wide = changed_facts(MODEL, num_heads=32, num_kv_heads=8)
    plan = choose(
        wide, cluster((10**6, 1), (10**6, 2), (10**6, 5)), WORKLOAD, parallel="tensor"
    ).plan
    assert heads(plan) == [4, 8, 20]
    three = choose(wide, cluster(*[(10**6, 4)] * 3), WORKLOAD, parallel="tensor").plan
    assert sorted(heads(three)) == [8, 12, 12]


def test_tensor_cuts_through_groups_when_there_are_more_devices_than_kv_heads() -> None:
    plan = choose(MODEL, cluster(*[(20_000, 1)] * 4), WORKLOAD, parallel="tensor").plan
    assert heads(plan) == [2, 2, 2, 2]
    held = [kv_heads(shard.heads, 8, 2) for shard in plan.stages[0].slices]
    assert held == [(0,), (0,), (1,), (1,)]


def test_tensor_leaves_devices_without_heads_when_there_are_more_devices_than_heads() -> None:
    nobody_idle = cluster(*[(20_000, 1)] * 12)
    plan = choose(MODEL, nobody_idle, WORKLOAD, parallel="tensor").plan
    plan.validate(MODEL, nobody_idle)
    assert len(plan.devices) == 12
    assert sum(heads(plan)) == 8
    assert 0 in heads(plan)


def test_a_slow_device_still_gets_something() -> None:
    plan = choose(MODEL, cluster((20_000, 1000), (20_000, 1)), WORKLOAD, parallel="tensor").plan
    slow = plan.stages[0].slices[1]
    assert (len(slow.heads), len(slow.ffn_columns), len(slow.vocab)) == (0, 0, 1)


def test_tensor_shares_follow_memory_where_it_is_short() -> None:
    tight = cluster((4_500, 8), (20_000, 1))
    plan = choose(MODEL, tight, WORKLOAD, parallel="tensor").plan
    check_fit(plan, MODEL, tight, WORKLOAD)
    small, large = describe(plan, MODEL, tight, WORKLOAD)
    # The fast device is filled until not one more group, block of columns and row would go in.
    assert small.left_bytes < 12 * 32 * 8
    assert large.memory.total > small.memory.total


def test_tensor_shares_every_kind_of_slice_by_the_same_measure() -> None:
    # The fast device holds some of everything rather than all heads and nothing else.
    wide = changed_facts(MODEL, ffn_columns=960, ffn_column_bytes=1, vocab_size=1000)
    whole = memory_use(choose(wide, cluster((10**6, 1)), WORKLOAD).plan, wide, WORKLOAD)["a"].total
    plan = choose(wide, cluster((whole // 2, 8), (10**6, 1)), WORKLOAD, parallel="tensor").plan
    fast = plan.stages[0].slices[0]
    assert len(fast.heads) == 4
    assert 384 <= len(fast.ffn_columns) <= 480
    assert 400 <= len(fast.vocab) <= 500


def test_tensor_gives_up_even_loads_where_memory_is_tight() -> None:
    # Even loads would cut through a group and hold its KV head twice; there is no room for that.
    tight = cluster((4_400, 3), (4_900, 3), (4_900, 4))
    plan = choose(MODEL, tight, WORKLOAD, parallel="tensor").plan
    check_fit(plan, MODEL, tight, WORKLOAD)
    assert heads(plan) == [0, 4, 4]
    roomy = cluster((20_000, 3), (20_000, 3), (20_000, 4))
    assert 0 not in heads(choose(MODEL, roomy, WORKLOAD, parallel="tensor").plan)


def test_tensor_with_a_rest_of_columns_uses_the_last_byte() -> None:
    odd = changed_facts(MODEL, ffn_columns=90, kv_bytes_per_token=0)
    exact = 12 * (80 + 20 + 720 + 32) + 600
    plan = choose(odd, cluster((exact, 1)), WORKLOAD, parallel="tensor").plan
    assert plan.stages[0].slices[0].ffn_columns == range(90)
    with pytest.raises(CapacityError):
        choose(odd, cluster((exact - 1, 1)), WORKLOAD, parallel="tensor")


def test_tensor_says_when_there_are_more_devices_than_anything() -> None:
    small = changed_facts(MODEL, vocab_size=2)
    with pytest.raises(PlanError, match=r"vocabulary of 2 is too small\. Use at most 2"):
        choose(small, cluster(*[(20_000, 1)] * 3), WORKLOAD, parallel="tensor")


def test_capacity_error_names_the_smallest_remedy() -> None:
    with pytest.raises(CapacityError) as caught:
        choose(MODEL, cluster((WHOLE_BYTES - 30, 1)), WORKLOAD)
    error = caught.value
    assert (error.device, error.missing_bytes) == ("a", 30)
    # A token takes 12 layers x 2 KV heads x 2 requests = 48 bytes.
    assert error.largest_context_tokens == 24
    assert str(error) == (
        "The model does not fit: 'a' lacks 30 bytes. What helps: that much more memory, or a"
        " smaller dtype for the weights, or at most 24 context tokens per request instead of 25."
    )


def test_capacity_error_of_a_pipeline_names_everyone_who_is_short() -> None:
    short = cluster((1_000, 1), (900, 1), (4_000, 1))
    with pytest.raises(CapacityError) as caught:
        choose(MODEL, short, WORKLOAD, parallel="pipeline")
    missing = {shortage.device: shortage.missing_bytes for shortage in caught.value.shortages}
    # One layer each on a and b; the other ten on c, whose room is largest.
    assert missing == {"a": 400, "b": 100, "c": 10 * 1_000 + HEAD_BYTES - 4_000}
    assert caught.value.device == "c"
    assert caught.value.largest_context_tokens is None


def test_capacity_error_of_auto_asks_for_the_least() -> None:
    # Alone, b lacks 1,600. As the end of a pipeline whose start holds a layer, it lacks 200 only.
    with pytest.raises(CapacityError) as caught:
        choose(MODEL, cluster((1_400, 1), (11_000, 1)), WORKLOAD)
    assert (caught.value.device, caught.value.missing_bytes) == ("b", 200)


def test_capacity_error_of_tensor_counts_what_every_shard_holds() -> None:
    floor_bytes = 12 * 32 + 6  # norms, and one row of the vocabulary
    with pytest.raises(CapacityError) as caught:
        choose(MODEL, cluster((20_000, 1), (0, 1)), WORKLOAD, parallel="tensor")
    assert [(one.device, one.missing_bytes) for one in caught.value.shortages] == [
        ("b", floor_bytes)
    ]


def test_an_empty_cluster_is_no_cluster() -> None:
    with pytest.raises(PlanError, match="no devices"):
        choose(MODEL, ClusterSpec(devices=()), WORKLOAD)


def test_unknown_ways_to_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'pipeline', 'tensor', not 'expert'"):
        choose(MODEL, cluster((20_000, 1)), WORKLOAD, parallel="expert")  # type: ignore[arg-type]


def test_the_order_of_stages_is_the_order_of_devices() -> None:
    devices = cluster((20_000, 1), (20_000, 5), (20_000, 3)).devices
    for order in itertools.permutations(devices):
        plan = choose(MODEL, ClusterSpec(devices=order), WORKLOAD, parallel="pipeline").plan
        assert plan.devices == tuple(device.id for device in order)
