"""The planner over thousands of made-up clusters: no simpler planner beats it, noise of
measurements costs no more than the noise, and small changes move no model.

The time of an answer grows by at most the factor that all measured times grow by. So a plan that is
chosen by measurements up to a part n too high or too low takes at most (1 + n)² of the best time,
beyond the gain for which a further device is taken.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from edge.partition import (
    CapacityError,
    Choice,
    ClusterSpec,
    ComputeRates,
    DeviceSpec,
    LinkSpec,
    ModelFacts,
    Plan,
    Shard,
    Stage,
    UnderWay,
    Workload,
    check_fit,
    choose,
    estimate,
    join,
)
from edge.partition.cost.contention import shares_host
from edge.partition.losses import joining
from edge.partition.plan.ranges import consecutive
from edge.partition.search.branch_and_bound import EXACT_DEVICES
from edge.partition.search.choose import LEAST_GAIN, LEAST_GAIN_ON_ONE_HOST
from tests.support.facts import facts_of, llama_facts, usual_rates
from tests.support.slow_cases import repeats_are_slow

Situation = tuple[ModelFacts, ClusterSpec, Workload]

_SIZES = (
    (30, 576, 1536, 9, 3, 49_152),
    (24, 896, 4864, 14, 2, 151_936),
    (22, 2048, 5632, 32, 4, 32_000),
    (32, 4096, 14_336, 32, 8, 128_256),
    (48, 5120, 13_824, 40, 8, 152_064),
)
"""Layers, hidden size, columns, heads, KV heads and vocabulary of models from 0.1 to 14 billion
weights."""

_LINKS = ((5e-3, 1.2e6), (2e-3, 12e6), (0.5e-3, 40e6), (0.2e-3, 117e6), (50e-6, 1.2e9))
"""Seconds and bytes per second: from 10 Mbit to 10 Gbit."""


def made_up(number: int, *, most_devices: int = 4, most_layers: int = 99) -> Situation:
    """The cluster of this number, always the same one. Its devices differ by up to 30 times in
    speed, and have between a tenth and three times of the memory that the model takes."""
    draw = random.Random(number)
    layers, *sizes = draw.choice(_SIZES)
    model = llama_facts(min(layers, most_layers), *sizes, bits=5)
    workload = Workload(
        prompt_tokens=draw.choice((16, 128, 512, 2048)),
        output_tokens=draw.choice((1, 32, 128, 512)),
        concurrency=draw.choice((1, 1, 1, 4, 16)),
    )
    facts = facts_of(model)
    tokens = workload.cached_tokens * facts.kv_bytes_per_token * facts.num_kv_heads
    whole = sum(layer.weight_bytes + tokens for layer in map(model.kinds.__getitem__, model.layers))
    whole += model.vocab_size * (model.embedding_row_bytes + model.head_row_bytes)
    devices = tuple(
        DeviceSpec(
            id=f"d{index}",
            name=f"device {index}",
            memory_bytes=int(whole * draw.choice((0.1, 0.3, 0.6, 0.9, 1.2, 3.0))),
            threads=draw.choice((1, 4, 8)),
            host=draw.choice(("", "", "", "desk")),
            rates=_rates(draw),
        )
        for index in range(draw.randint(2, most_devices))
    )
    links: list[LinkSpec] = []
    for one, other in combinations(devices, 2):
        latency_s, bytes_per_s = draw.choice(_LINKS)
        if one.host and one.host == other.host:
            latency_s, bytes_per_s = 15e-6, 5e9
        links += [
            LinkSpec(source=a.id, target=b.id, latency_s=latency_s, bytes_per_s=bytes_per_s)
            for a, b in ((one, other), (other, one))
        ]
    return model, ClusterSpec(devices=devices, links=tuple(links)), workload


def _rates(draw: random.Random) -> ComputeRates:
    bytes_per_s = 2e9 * 30 ** draw.random()
    run_s = draw.choice((10e-6, 50e-6))
    rates = usual_rates(
        bytes_per_s,
        attention_slice_s=(run_s,) * 4,
        feed_forward_slice_s=(run_s / 2,) * 4,
        run_s=run_s,
    )
    shared = tuple(draw.choice((1.0, 2.0)) * each for each in rates.seconds_per_byte)
    return replace(
        rates,
        shared_seconds_per_byte=shared,
        attention_s=(draw.choice((0.5e-9, 5e-9)),) * 4,
        jitter=draw.choice((0.0, 0.05, 0.2)),
    )


def measured(cluster: ClusterSpec, noise: float, number: int) -> ClusterSpec:
    """The cluster as noisy measurements show it: each device and link is up to so many parts
    faster or slower. number: other noise for another number."""
    draw = random.Random(f"{number} {noise}")

    def factor() -> float:
        return float((1 + noise) ** draw.uniform(-1, 1))

    devices = tuple(
        replace(each, rates=each.rates.slowed_by(factor())) if each.rates else each
        for each in cluster.devices
    )
    links = tuple(
        replace(each, latency_s=each.latency_s * factor(), bytes_per_s=each.bytes_per_s * factor())
        for each in cluster.links
    )
    return replace(cluster, devices=devices, links=links)


def rivals(situation: Situation, number: int, *, at_random: int = 24) -> Iterator[Plan]:
    """Plans that fit: greedy ones, then random ones. Greedy: the fastest devices with as many
    layers as they have room for; and the fastest as a pipeline, or in one stage, by their rates."""
    model, cluster, _workload = situation
    draw = random.Random(number)
    by_rate = sorted(cluster.devices, key=_pace)
    ids = [device.id for device in by_rate]
    speeds = {device.id: 1 / _pace(device) for device in by_rate}
    for count in range(1, len(ids) + 1):
        used = ids[:count]
        yield from _fitting(situation, [[id] for id in used], speeds)
        yield from _fitting(situation, [used], speeds)
        yield from _fitting(situation, [[id] for id in used], _room(by_rate))
    for _ in range(at_random):
        used = draw.sample(ids, draw.randint(1, len(ids)))
        groups: list[list[str]] = [[]]
        for id in used:
            if groups[-1] and draw.random() < 0.6:
                groups.append([])
            groups[-1].append(id)
        guessed = {id: speed * draw.choice((0.5, 0.8, 1, 1.3, 2)) for id, speed in speeds.items()}
        if len(groups) <= model.num_layers:
            yield from _fitting(situation, groups, guessed)


def _pace(device: DeviceSpec) -> float:
    assert device.rates is not None
    return device.rates.seconds_per_byte[0]


def _room(devices: Sequence[DeviceSpec]) -> dict[str, float]:
    """Shares by memory."""
    return {device.id: float(device.memory_bytes) for device in devices}


def _fitting(
    situation: Situation, groups: Sequence[Sequence[str]], shares: Mapping[str, float]
) -> Iterator[Plan]:
    """The plan of these stages, with layers, heads and columns by shares, if it fits."""
    model, cluster, workload = situation
    facts = facts_of(model)
    if len(groups) > model.num_layers:
        return
    counts = _divided(model.num_layers, [sum(map(shares.__getitem__, each)) for each in groups], 1)
    stages: list[Stage] = []
    start = 0
    for number, (group, layers) in enumerate(zip(groups, counts, strict=True)):
        own = [shares[id] for id in group]
        vocab = model.vocab_size if number in (0, len(groups) - 1) else 0
        multiple = model.column_multiple
        parts = zip(
            group,
            consecutive(_divided(facts.num_heads, own, 1)),
            consecutive(
                [each * multiple for each in _divided(facts.ffn_columns // multiple, own, 1)]
            ),
            consecutive(_divided(vocab, own, 0)),
            strict=True,
        )
        stages.append(
            Stage(
                layers=range(start, start + layers),
                shards=tuple(
                    Shard(device=id, heads=heads, ffn_columns=columns, vocab=rows)
                    for id, heads, columns, rows in parts
                ),
            )
        )
        start += layers
    plan = Plan(model=model.name, version=1, stages=tuple(stages))
    with contextlib.suppress(CapacityError):
        check_fit(plan, model, cluster, workload)
        yield plan


def _divided(total: int, shares: Sequence[float], least: int) -> list[int]:
    """Whole numbers by shares, each at least so large."""
    left, parts = total - least * len(shares), []
    for index, share in enumerate(shares):
        part = round(left * share / sum(shares[index:]))
        parts.append(least + part)
        left -= part
    return parts


NEARLY_ONE = 1 + 1e-9

SMALL_CHANGE = 0.02

SHORT_OF_MEMORY = 0.02
"""Where memory is short, shares of a stage are not searched exactly: of 2,000 clusters one had a
plan of fewer devices that the search found in a form slower by 1.4 %."""

CORPUS = Path(__file__).parents[1] / "corpus" / "clusters.json"
"""Clusters for which the planner was once wrong, or is not exact: a failing one is added here."""


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    why: str
    model: ModelFacts
    cluster: ClusterSpec
    workload: Workload

    @property
    def situation(self) -> Situation:
        return self.model, self.cluster, self.workload


KEPT = msgspec.json.decode(CORPUS.read_bytes(), type=list[Kept])


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.why)
def test_clusters_that_are_kept(kept: Kept) -> None:
    check_rivals(kept.situation, 0)


def chosen(situation: Situation) -> Choice | None:
    """None where memory is short."""
    try:
        return choose(*situation)
    except CapacityError:
        return None


def seconds(plan: Plan, situation: Situation) -> float:
    return estimate(plan, *situation[:2], situation[2]).total_s(situation[2])


def tolerance(choice: Choice, situation: Situation) -> float:
    """What a further device must gain: more on one host."""
    (fastest, _), *_ = sorted(
        [(choice.plan, choice.predicted), *choice.runners_up],
        key=lambda each: seconds(each[0], situation),
    )
    devices = [situation[1].device(id) for id in fastest.devices]
    shared = any(shares_host(devices, device) for device in devices)
    return LEAST_GAIN_ON_ONE_HOST if shared else LEAST_GAIN


def check_rivals(situation: Situation, number: int) -> None:
    choice, others = chosen(situation), list(rivals(situation, number))
    if choice is None:
        assert not others, f"{others[0]} fits"
        return
    check_fit(choice.plan, *situation)
    taken_s, more = seconds(choice.plan, situation), 1 + tolerance(choice, situation)
    fastest_s = min([taken_s, *(seconds(plan, situation) for plan, _ in choice.runners_up)])
    assert taken_s <= fastest_s * more * NEARLY_ONE
    if choice.solo is not None:
        assert taken_s <= choice.solo.estimate.total_s(situation[2]) * NEARLY_ONE
    is_exact = len(situation[1].devices) <= EXACT_DEVICES
    for rival in others:
        rival_s = seconds(rival, situation)
        assert fastest_s <= rival_s * NEARLY_ONE, f"{rival} is faster than {choice.plan}"
        if len(rival.devices) < len(choice.plan.devices) and is_exact:
            enough_s = fastest_s * more / (1 + SHORT_OF_MEMORY)
            assert rival_s > enough_s, f"{rival} has fewer devices"


def check_noise(situation: Situation, number: int) -> None:
    model, cluster, workload = situation
    if (best := chosen(situation)) is None:
        return
    best_s = min(seconds(plan, situation) for plan in (best.plan, *(p for p, _ in best.runners_up)))
    for noise in (0.02, 0.1):
        seen = (model, measured(cluster, noise, number), workload)
        found = chosen(seen)
        assert found is not None
        most = best_s * (1 + noise) ** 2 * (1 + tolerance(found, seen))
        assert seconds(found.plan, situation) <= most * NEARLY_ONE


def check_steady(situation: Situation, number: int) -> None:
    """A model stays where the facts change a little, and does not go back after a real move."""
    model, cluster, workload = situation
    if (choice := chosen(situation)) is None:
        return
    none = UnderWay()
    nearly = measured(cluster, SMALL_CHANGE, number)
    assert join(choice.plan, model, nearly, workload, none).when == "stay"
    other = measured(cluster, 1.5, number)
    move = join(choice.plan, model, other, workload, none)
    if move.to is None or move.before is None or move.to.predicted is None:
        return
    before = estimate(choice.plan, model, other, workload)
    without = joining.HORIZON_S / before.token_s
    left_s = joining.HORIZON_S - move.pause_s - joining.SHIPPING_COSTS * move.ships_s
    gained = left_s / seconds_of_a_token(move.to.plan, (model, other, workload)) - without
    assert gained >= (joining.LEAST_GAIN - 1) * without / NEARLY_ONE
    for again in range(2):
        nearly = measured(other, SMALL_CHANGE, again)
        assert join(move.to.plan, model, nearly, workload, none).when == "stay"


def seconds_of_a_token(plan: Plan, situation: Situation) -> float:
    return estimate(plan, *situation[:2], situation[2]).token_s


Check = Callable[[Situation, int], None]


def blocks(
    check: Check, most_devices: int, first: int, last: int, size: int
) -> Iterator[tuple[Check, int, range]]:
    for start in range(first, last, size):
        yield check, most_devices, range(start, min(start + size, last))


@pytest.mark.parametrize(
    ("check", "most_devices", "numbers"),
    repeats_are_slow(
        [
            *blocks(check_rivals, 3, 0, 2000, 40),
            *blocks(check_rivals, 7, 3000, 3200, 3),  # not every arrangement is searched
            *blocks(check_noise, 3, 4000, 4600, 10),
            *blocks(check_steady, 3, 5000, 5300, 8),
        ],
        of=(0, 1),
    ),
)
def test_made_up_clusters(check: Check, most_devices: int, numbers: range) -> None:
    for number in numbers:
        check(made_up(number, most_devices=most_devices), number)
