"""Made-up clusters by number: models, devices and links as homes have them, with known noise."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

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
from edge.partition.plan.ranges import consecutive
from tests.support.facts import facts_of, llama_facts, usual_rates

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
