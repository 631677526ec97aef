"""Strategies: small models on devices and links that were measured, and every plan there is."""

from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement, pairwise, permutations, product

from hypothesis import strategies as st

from edge.partition import (
    CapacityError,
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    LinkSpec,
    ModelFacts,
    Plan,
    Shard,
    Stage,
    Workload,
    check_fit,
)
from tests.property.plan_situations import Situation, whole_bytes
from tests.support.facts import facts_of, plain_facts


def seconds(least: float, most: float) -> st.SearchStrategy[float]:
    return st.integers(10, 1000).map(lambda part: least + (most - least) * part / 1000)


@st.composite
def rates(draw: st.DrawFn) -> ComputeRates:
    alone = tuple(draw(seconds(1e-8, 1e-6)) * (1 + index) for index in range(2))
    slowdown = draw(st.sampled_from((1.0, 1.5, 2.0)))
    return ComputeRates(
        rows=(1, draw(st.integers(2, 40))),
        seconds_per_byte=alone,
        shared_seconds_per_byte=tuple(slowdown * each for each in alone),
        slice_seconds_per_byte=tuple(draw(st.sampled_from((0.5, 1.0))) * each for each in alone),
        attention_slice_s=(draw(seconds(0, 1e-5)), draw(seconds(0, 1e-5))),
        feed_forward_slice_s=(draw(seconds(0, 1e-5)), draw(seconds(0, 1e-5))),
        attention_s=(draw(seconds(0, 1e-7)), draw(seconds(0, 1e-7))),
        run_s=draw(seconds(0, 1e-5)),
        jitter=draw(st.sampled_from((0.0, 0.05, 0.3))),
        sample_s=draw(seconds(0, 1e-5)),
        step_s=draw(seconds(0, 1e-5)),
    )


@st.composite
def small_models(draw: st.DrawFn, *, most_layers: int = 3) -> ModelFacts:
    num_kv_heads = draw(st.sampled_from((1, 2)))
    return plain_facts(
        name="small",
        num_layers=draw(st.integers(1, most_layers)),
        hidden_size=draw(st.sampled_from((8, 6000))),
        num_heads=num_kv_heads * draw(st.integers(1, 2)),
        num_kv_heads=num_kv_heads,
        ffn_columns=draw(st.sampled_from((2, 3, 5))),
        vocab_size=draw(st.integers(3, 4)),
        tied_embeddings=False,
        column_multiple=draw(st.sampled_from((1, 2))),
        query_head_bytes=draw(st.integers(1, 50)),
        kv_head_bytes=draw(st.integers(0, 50)),
        ffn_column_bytes=draw(st.integers(1, 50)),
        layer_bytes=draw(st.integers(0, 20)),
        embedding_row_bytes=draw(st.integers(0, 20)),
        head_row_bytes=draw(st.integers(1, 50)),
        kv_bytes_per_token=draw(st.integers(0, 1)),
    )


workloads = st.builds(
    Workload,
    prompt_tokens=st.sampled_from((1, 20, 300, 600)),
    output_tokens=st.sampled_from((0, 1, 9)),
    concurrency=st.sampled_from((1, 3)),
)


@st.composite
def measured_situations(
    draw: st.DrawFn, *, most_devices: int = 3, most_layers: int = 3
) -> Situation:
    """Memory between too little and plenty, links between far slower and far faster than work."""
    model = draw(small_models(most_layers=most_layers))
    workload = draw(workloads)
    whole = whole_bytes(model, workload)
    count = draw(st.integers(1, most_devices))
    devices = tuple(
        DeviceSpec(
            id=f"d{number}",
            name=f"name {number}",
            memory_bytes=whole * draw(st.sampled_from((30, 45, 60, 80, 120, 300))) // 100,
            threads=1,
            host=draw(st.sampled_from(("", "one"))),
            rates=draw(rates()),
        )
        for number in range(count)
    )
    latency_s = draw(st.sampled_from((0.0, 1e-6, 1e-4)))
    links = tuple(
        LinkSpec(
            source=source.id,
            target=target.id,
            latency_s=latency_s * draw(st.sampled_from((1, 2))),
            bytes_per_s=draw(st.sampled_from((1e8, 1e11))),
        )
        for source, target in permutations(devices, 2)
        if draw(st.booleans())
    )
    return model, ClusterSpec(devices=devices, links=links), workload


def fits(plan: Plan, situation: Situation) -> bool:
    model, cluster, workload = situation
    try:
        check_fit(plan, model, cluster, workload)
    except CapacityError:
        return False
    return True


def every_plan(situation: Situation) -> Iterator[Plan]:
    """All plans that fit, by brute force."""
    model, cluster, _ = situation
    ids = [device.id for device in cluster.devices]
    for count in range(1, len(ids) + 1):
        for order in permutations(ids, count):
            for stages in range(1, min(count, model.num_layers) + 1):
                for group_cuts in combinations(range(1, count), stages - 1):
                    groups = [order[a:b] for a, b in pairwise((0, *group_cuts, count))]
                    for cuts in combinations(range(1, model.num_layers), stages - 1):
                        layers = list(pairwise((0, *cuts, model.num_layers)))
                        yield from _shared(situation, groups, layers)


def _shared(
    situation: Situation, groups: Sequence[Sequence[str]], layers: Sequence[tuple[int, int]]
) -> Iterator[Plan]:
    model, _, _ = situation
    last = len(groups) - 1
    ways: list[list[Stage]] = []
    for number, (group, bounds) in enumerate(zip(groups, layers, strict=True)):
        vocab = model.vocab_size if number in (0, last) else 0
        ways.append(
            [
                Stage(layers=range(*bounds), shards=shards)
                for heads in ranges(facts_of(model).num_heads, len(group))
                for columns in ranges(
                    facts_of(model).ffn_columns, len(group), model.column_multiple
                )
                for rows in ranges(vocab, len(group))
                if all(map(any, zip(heads, columns, rows, strict=True)))
                for shards in [
                    tuple(
                        Shard(device=id, heads=head, ffn_columns=column, vocab=row)
                        for id, head, column, row in zip(group, heads, columns, rows, strict=True)
                    )
                ]
            ]
        )
    for stages in product(*ways):
        plan = Plan(model=model.name, version=1, stages=stages)
        if fits(plan, situation):
            yield plan


def ranges(total: int, parts: int, multiple: int = 1) -> Iterator[tuple[range, ...]]:
    """Every way to cut 0..total into ranges at multiples, in order; some may be empty."""
    cuts = [*range(0, total, multiple), total]
    for inner in combinations_with_replacement(cuts, parts - 1):
        yield tuple(range(start, stop) for start, stop in pairwise((0, *inner, total)))
