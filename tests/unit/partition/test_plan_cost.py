"""Each term of the time of a plan, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest

from edge.partition import (
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    Estimate,
    LinkSpec,
    PartitionError,
    Plan,
    Shard,
    Stage,
    Workload,
    estimate,
)
from edge.partition.cost.message_times import NO_LINK_S, UNKNOWN_LINK, UNKNOWN_LOCAL_LINK, Network
from edge.partition.cost.pace import expected_maximum
from tests.support.facts import changed_facts, crowd_of, facts_of, plain_facts, plain_rates

# Bytes of a layer: 4 heads x 10, 2 KV heads x 5, 8 columns x 10, 20 the rest: 150.
MODEL = plain_facts(
    name="m",
    num_layers=3,
    hidden_size=1000,
    num_heads=4,
    num_kv_heads=2,
    ffn_columns=8,
    vocab_size=10,
    tied_embeddings=False,
    column_multiple=1,
    query_head_bytes=10,
    kv_head_bytes=5,
    ffn_column_bytes=10,
    layer_bytes=20,
    embedding_row_bytes=7,
    head_row_bytes=3,
    kv_bytes_per_token=1,
)
RATES = plain_rates((1, 101), (1.0, 11.0), shared=2.0)
WORKLOAD = Workload(prompt_tokens=1, output_tokens=10)
ENDLESS = 1e18
"""Bytes per second of a link that takes no time."""


def cluster(
    *rates: ComputeRates, latency_s: float = 0.0, bytes_per_s: float = ENDLESS, host: str = ""
) -> ClusterSpec:
    """Devices a, b, c, ... with links between all."""
    devices = tuple(
        DeviceSpec(id=id, name=id, memory_bytes=10**9, threads=1, host=host, rates=each)
        for id, each in zip("abcdefgh", rates, strict=False)
    )
    links = tuple(
        LinkSpec(source=one.id, target=other.id, latency_s=latency_s, bytes_per_s=bytes_per_s)
        for one in devices
        for other in devices
        if one is not other
    )
    return ClusterSpec(devices=devices, links=links)


def shard(device: str, heads: range, columns: range, vocab: range = range(0)) -> Shard:
    return Shard(device=device, heads=heads, ffn_columns=columns, vocab=vocab)


def whole(device: str, layers: range, *, outer: bool = True) -> Stage:
    return Stage(
        layers=layers,
        shards=(shard(device, range(4), range(8), range(10 if outer else 0)),),
    )


ALONE = Plan(model="m", version=1, stages=(whole("a", range(3)),))
CHAIN = Plan(model="m", version=1, stages=(whole("a", range(2)), whole("b", range(2, 3))))
# a: 2 heads, 5 columns, 4 rows; b: 2 heads, 3 columns, 6 rows.
SPLIT = Plan(
    model="m",
    version=1,
    stages=(
        Stage(
            layers=range(3),
            shards=(
                shard("a", range(2), range(5), range(4)),
                shard("b", range(2, 4), range(5, 8), range(4, 10)),
            ),
        ),
    ),
)


def of(plan: Plan, devices: ClusterSpec, workload: Workload = WORKLOAD, **options: int) -> Estimate:
    return estimate(plan, MODEL, devices, workload, **options)


def seconds(found: Estimate, kind: str) -> float:
    return sum(term.seconds for term in found.terms if term.kind == kind)


def test_weights_are_read_once_a_step_however_many_ask() -> None:
    found = of(ALONE, cluster(RATES))
    assert found.token_s == pytest.approx(3 * 150 + 30)
    assert found.tokens_per_s == pytest.approx(1 / 480)
    three = of(ALONE, cluster(RATES), replace(WORKLOAD, concurrency=3))
    assert three.token_s == pytest.approx(480 * 1.2)
    assert three.tokens_per_s == pytest.approx(3 / (480 * 1.2))
    assert found.bottleneck == "reading the weights on a: 480,000 ms of 480,000 ms"
    assert dict(found.device_s) == pytest.approx({"a": 480})


def test_attention_is_rows_by_context_by_heads_by_layers() -> None:
    rates = replace(RATES, attention_s=(0.5, 0.5))
    found = of(ALONE, cluster(rates), Workload(prompt_tokens=20, output_tokens=10, concurrency=2))
    assert seconds(found, "attention") == pytest.approx(2 * 25 * 4 * 3 * 0.5)


@pytest.mark.parametrize(
    ("reads_windows", "kept", "read"),
    [(True, None, 6), (True, 9, 6), (False, None, 25), (False, 9, 9)],
)
def test_a_row_reads_its_window_or_all_that_is_kept(
    reads_windows: bool, kept: int | None, read: int
) -> None:
    model = changed_facts(MODEL, seen_tokens=6, window_tokens=kept)
    devices = cluster(replace(RATES, attention_s=(0.5, 0.5)))
    device = replace(devices.devices[0], reads_windows=reads_windows)
    workload = Workload(prompt_tokens=20, output_tokens=10)
    found = estimate(ALONE, model, replace(devices, devices=(device,)), workload)
    assert seconds(found, "attention") == pytest.approx(read * 4 * 3 * 0.5)


def test_graph_runs() -> None:
    rates = replace(RATES, run_s=7.0)
    assert seconds(of(ALONE, cluster(rates)), "runs") == pytest.approx(7)
    assert seconds(of(CHAIN, cluster(rates, rates)), "runs") == pytest.approx(14)
    # The embedding, two for each layer, the head.
    assert seconds(of(SPLIT, cluster(rates, rates)), "runs") == pytest.approx(7 * (1 + 6 + 1))


def test_a_split_stage_that_is_neither_first_nor_last_runs_two_a_layer_and_one() -> None:
    rates = replace(RATES, run_s=7.0)
    middle = Stage(
        layers=range(1, 2),
        shards=(shard("b", range(2), range(4)), shard("c", range(2, 4), range(4, 8))),
    )
    plan = Plan(
        model="m", version=1, stages=(whole("a", range(1)), middle, whole("d", range(2, 3)))
    )
    found = of(plan, cluster(*[rates] * 4))
    assert seconds(found, "runs") == pytest.approx(7 * (1 + 3 + 1))
    assert next(term.count for term in found.terms if term.kind == "reduce") == 2


def test_each_segment_ends_with_its_slowest_shard() -> None:
    twice = replace(RATES, seconds_per_byte=(2.0, 22.0), slice_seconds_per_byte=(2.0, 22.0))
    found = of(SPLIT, cluster(RATES, twice))
    # Attention: 2 heads, 1 KV head, half of the rest are 35 bytes, on b 70 s. Columns: 60 on a,
    # 2 x 40 on b. Head: 12 on a, 2 x 18 on b.
    assert found.token_s == pytest.approx(3 * (70 + 80) + 36)
    assert dict(found.device_s) == pytest.approx({"a": 3 * (35 + 60) + 12, "b": 3 * (70 + 80) + 36})


def test_slices_have_a_cost_of_their_own_for_a_byte_and_one_that_is_fixed() -> None:
    cheap = replace(
        RATES,
        slice_seconds_per_byte=(0.5, 5.5),
        attention_slice_s=(4.0, 4.0),
        feed_forward_slice_s=(7.0, 7.0),
        run_s=1.0,
    )
    found = of(SPLIT, cluster(cheap, cheap))
    # Of 35, 60 and 18 bytes half of the time; a run for each, and one of the embedding.
    assert found.token_s == pytest.approx(3 * (17.5 + 1 + 4 + 30 + 1 + 7) + (9 + 1) + 1)
    assert seconds(found, "runs") == pytest.approx(3 * (5 + 8) + 2)
    alone = of(ALONE, cluster(cheap))
    assert seconds(alone, "runs") == 1, "a stage that is not split is one graph"
    whole = of(ALONE, cluster(RATES))
    head_s = MODEL.vocab_size * MODEL.head_row_bytes
    assert seconds(alone, "compute") == pytest.approx(seconds(whole, "compute") - head_s / 2)


def test_a_slice_of_nothing_has_no_operators() -> None:
    first, second = SPLIT.stages[0].slices
    lazy = replace(
        SPLIT.stages[0],
        shards=(
            replace(first, heads=range(facts_of(MODEL).num_heads), ffn_columns=range(0)),
            replace(
                second, heads=range(facts_of(MODEL).num_heads, facts_of(MODEL).num_heads),
                ffn_columns=range(facts_of(MODEL).ffn_columns),
            ),
        ),
    )  # fmt: skip
    costly = replace(RATES, attention_slice_s=(100.0, 100.0), feed_forward_slice_s=(200.0, 200.0))
    plan = replace(SPLIT, stages=(lazy,))
    own_s = dict(of(plan, cluster(RATES, RATES)).device_s)
    found = dict(of(plan, cluster(costly, costly)).device_s)
    assert found == pytest.approx({"a": own_s["a"] + 3 * 100, "b": own_s["b"] + 3 * 200})


def test_waiting_is_the_expected_largest_of_the_shards() -> None:
    jittery = replace(RATES, jitter=0.1)
    found = of(SPLIT, cluster(jittery, jittery))
    mean_s = 3 * (35 + 60) + 18
    assert seconds(found, "wait") == pytest.approx(mean_s * 0.1 * expected_maximum(2))
    assert seconds(found, "compute") == pytest.approx(mean_s)
    assert seconds(of(ALONE, cluster(jittery)), "wait") == 0


def test_expected_maxima() -> None:
    assert expected_maximum(1) == 0
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-6)
    assert expected_maximum(10) == pytest.approx(1.538753, rel=1e-5)  # Harter, 1961


def test_neighbours_cost_each_other_what_was_measured_of_them_together() -> None:
    together = cluster(RATES, RATES, host="h")
    crowd = crowd_of(2, (5.0, 7.0), link=(0.0, ENDLESS))
    assert of(SPLIT, together).token_s == pytest.approx(3 * (35 + 60) + 18)
    crowded = replace(together, crowds=(crowd,))
    found = of(SPLIT, crowded)
    assert seconds(found, "reduce") - seconds(of(SPLIT, together), "reduce") == pytest.approx(7 * 5)
    # Stages decode in turn, but compute at once while chunks of a prompt follow each other.
    for each in (together, crowded):
        chain = of(CHAIN, each, replace(WORKLOAD, prompt_tokens=2))
        assert chain.token_s == pytest.approx(480)
        assert chain.first_token_s == pytest.approx(150 * 3 * 1.1 + 30)
        chunks = of(CHAIN, each, replace(WORKLOAD, prompt_tokens=2), chunk_tokens=1)
        assert chunks.first_token_s == pytest.approx(2 * (480 + 300))


def test_messages_of_neighbours_take_what_was_measured_with_what_they_cost_each_other() -> None:
    """Whatever the link between them was found to be since, if there is one at all."""
    crowd = crowd_of(2, (0.0,), link=(0.5, 1000))
    for latency_s, expected_s in ((0.1, 0.5 + 4), (0.9, 0.5 + 4), (NO_LINK_S, NO_LINK_S)):
        near = cluster(RATES, RATES, host="h", latency_s=latency_s)
        found = of(SPLIT, replace(near, crowds=(crowd,)))
        assert seconds(found, "reduce") == pytest.approx(7 * expected_s)
    unknown = replace(near, links=(), crowds=(crowd,))
    assert seconds(of(SPLIT, unknown), "reduce") == pytest.approx(7 * (0.5 + 4))
    far = cluster(RATES, RATES, latency_s=0.1)
    assert seconds(of(SPLIT, replace(far, crowds=(crowd,))), "reduce") == pytest.approx(0.7)


def test_sums_of_two() -> None:
    found = of(SPLIT, cluster(RATES, RATES, latency_s=0.5, bytes_per_s=1000))
    assert seconds(found, "reduce") == pytest.approx(7 * (0.5 + 4))
    assert next(term.count for term in found.terms if term.kind == "reduce") == 7


@pytest.mark.parametrize(
    ("nbytes", "expected_s"),
    [
        (1000, 0.5 + 2 * 1),
        (32 << 10, 0.5 + 2 * 32.768),
        (64 << 10, 3 * (0.5 + 65.536)),
        (90_000, 2 * 3 * (0.5 + 30)),
    ],
)
def test_sums_of_three(nbytes: int, expected_s: float) -> None:
    network = Network(cluster(*[RATES] * 3, latency_s=0.5, bytes_per_s=1000))
    assert network.sum_s("abc", nbytes) == pytest.approx(expected_s)


def test_exchanges_of_two_and_four_need_no_round_of_rest() -> None:
    network = Network(cluster(*[RATES] * 4, latency_s=0.5, bytes_per_s=1000))
    assert network.sum_s("ab", 64 << 10) == pytest.approx(0.5 + 65.536)
    assert network.sum_s("abcd", 64 << 10) == pytest.approx(3 * (0.5 + 65.536))


def test_the_slower_way_decides_a_sum_of_two() -> None:
    devices = cluster(RATES, RATES).devices
    links = (
        LinkSpec(source="a", target="b", latency_s=1, bytes_per_s=ENDLESS),
        LinkSpec(source="b", target="a", latency_s=3, bytes_per_s=ENDLESS),
    )
    network = Network(ClusterSpec(devices=devices, links=links))
    assert network.sum_s("ab", 100) == pytest.approx(3)
    assert network.sum_s("a", 100) == 0


def test_links_that_nobody_measured() -> None:
    devices = cluster(RATES, RATES, RATES).devices
    one_way = LinkSpec(source="a", target="b", latency_s=9, bytes_per_s=1)
    network = Network(ClusterSpec(devices=devices, links=(one_way,)))
    assert network.link("a", "b") == network.link("b", "a") == (9, 1)
    assert network.link("a", "c") == UNKNOWN_LINK
    local = tuple(replace(device, host="h") for device in devices)
    assert Network(ClusterSpec(devices=local)).link("a", "b") == UNKNOWN_LOCAL_LINK


def test_hops_between_stages_and_back() -> None:
    found = of(CHAIN, cluster(RATES, RATES, latency_s=0.5, bytes_per_s=1000))
    assert seconds(found, "hop") == pytest.approx((0.5 + 4) + (0.5 + 0.008))
    assert found.token_s == pytest.approx(480 + 5.008)


def test_numbers_that_travel_rounded_take_less_of_a_link() -> None:
    rounded = changed_facts(MODEL, wire_number_bytes=2.0)
    network = cluster(RATES, RATES, latency_s=0.5, bytes_per_s=1000)
    assert seconds(estimate(SPLIT, rounded, network, WORKLOAD), "reduce") == pytest.approx(7 * 2.5)
    found = estimate(CHAIN, rounded, network, WORKLOAD)
    assert seconds(found, "hop") == pytest.approx((0.5 + 2) + (0.5 + 0.008))


def test_a_sender_serves_its_ranks_in_turn() -> None:
    network = Network(cluster(*[RATES] * 5, latency_s=0.5, bytes_per_s=1000))
    assert network.hop_s("a", "bcd", 1000) == pytest.approx(0.5 + 3)
    assert network.hop_s("ab", "cde", 1000) == pytest.approx(0.5 + 2)
    assert network.hop_s("abc", "d", 1000) == pytest.approx(0.5 + 1)


def test_the_best_tokens_travel_to_rank_0() -> None:
    found = of(SPLIT, cluster(RATES, RATES, latency_s=0.5, bytes_per_s=1000))
    assert seconds(found, "sample") == pytest.approx(0.5)


def test_choosing_and_the_step_itself() -> None:
    rates = replace(RATES, sample_s=5.0, step_s=2.0)
    found = of(CHAIN, cluster(rates, rates), replace(WORKLOAD, concurrency=3))
    assert seconds(found, "sample") == pytest.approx(3 * 5)
    assert seconds(found, "step") == pytest.approx(2 * 2)


def test_chunks_fill_the_pipeline_once() -> None:
    # 6 tokens in chunks of 2: a row more costs 0.1 of the first. a: 300 x 1.1, b: 150 x 1.1 + 30.
    workload = Workload(prompt_tokens=6, output_tokens=1)
    found = of(CHAIN, cluster(RATES, RATES), workload, chunk_tokens=2)
    assert found.first_token_s == pytest.approx((330 + 195) + 2 * 330)
    assert of(CHAIN, cluster(RATES, RATES), workload).first_token_s == pytest.approx(450 * 1.5 + 30)
    assert found.total_s(workload) == pytest.approx(found.first_token_s + found.token_s)


def test_the_terms_add_up_and_the_largest_is_the_bottleneck() -> None:
    slow_link = cluster(RATES, RATES, latency_s=100.0, bytes_per_s=1e9)
    found = of(SPLIT, slow_link)
    assert sum(term.seconds for term in found.terms) == pytest.approx(found.token_s)
    assert found.bottleneck == "the link a-b: 7 sums x 100,000 ms"


def test_a_device_with_two_stages_is_as_unsteady_as_two_devices() -> None:
    """A step is slower by what each stage is, whoever computes it."""
    unsteady = cluster(*[replace(RATES, spread=(0.5, 3.0))] * 2)

    def ranges(*devices: str) -> tuple[float, float]:
        stages = tuple(
            whole(device, range(number, number + 1), outer=number != 1)
            for number, device in enumerate(devices)
        )
        plan = Plan(model="m", version=1, stages=stages)
        return estimate(plan, MODEL, unsteady, WORKLOAD).tokens_per_s_range

    assert ranges("a", "b", "a") == pytest.approx(ranges("a", "a", "a"))
    low, high = ranges("a", "b", "a")
    assert high / low == pytest.approx(3.0 / 0.5)


def test_devices_must_have_been_measured() -> None:
    devices = cluster(RATES, RATES)
    unmeasured = replace(devices.devices[1], rates=None)
    with pytest.raises(PartitionError, match="'b' has not been measured"):
        of(CHAIN, replace(devices, devices=(devices.devices[0], unmeasured)))
    assert of(ALONE, replace(devices, devices=(devices.devices[0], unmeasured))).token_s > 0
