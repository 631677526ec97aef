"""The load of devices that each have some experts of a layer whole. Pure.

A token goes through few experts, which are known only after the router ran. So devices have unequal
numbers of them, and a stage waits for the slowest.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from edge.partition.plan.facts import LayerFacts, ModelFacts
from edge.partition.plan.plan import Stage


def chances(model: ModelFacts, layer: int) -> tuple[float, ...]:
    """For each expert of the layer, the part of all tokens that go through it."""
    facts = model.kinds[model.layers[layer]]
    if model.expert_uses:
        return model.expert_uses[layer]
    return (facts.top_k / facts.num_experts,) * facts.num_experts if facts.num_experts else ()


def chances_held(stage: Stage, model: ModelFacts, layer: int) -> tuple[tuple[float, ...], ...]:
    """The same for the experts of each shard of the stage."""
    every, index = chances(model, layer), layer - stage.layers.start
    return tuple(
        tuple(every[number] for number in shard.experts[index]) if shard.experts else ()
        for shard in stage.slices
    )


def load(chances: Sequence[float], facts: LayerFacts) -> float:
    """The average part of a layer's expert work that falls on these experts."""
    return sum(chances) / facts.top_k


@lru_cache(maxsize=1024)
def expected_slowest(
    others_s: tuple[float, ...],
    expert_s: tuple[float, ...],
    chances: tuple[tuple[float, ...], ...],
    top_k: int,
) -> float:
    """Mean seconds until every device has computed its part of a layer for one token.

    others_s, expert_s: by device, seconds for all but experts, and for each expert. chances: by
    device, the chance of each expert that it has. Experts are assumed to be chosen independently,
    conditioned on `top_k` of them (conditional Poisson sampling, Hajek, 1964). The result is the
    mean of the maximum, summed over its possible values.
    """
    counts = [_counts(each, top_k) for each in chances]
    every = _product(counts, [top_k] * len(counts), top_k)
    if not every:
        return max(others_s, default=0.0)
    times = {
        other_s + count * each_s
        for other_s, each_s, own in zip(others_s, expert_s, counts, strict=True)
        for count in range(len(own))
    }
    total = reached = 0.0
    for seconds in sorted(times):
        most = [
            math.floor((seconds - other_s) / each_s + 1e-9) if each_s else top_k
            for other_s, each_s in zip(others_s, expert_s, strict=True)
        ]
        if min(most) < 0:
            continue
        within = _product(counts, most, top_k) / every
        total += seconds * (within - reached)
        reached = within
    return total


@lru_cache(maxsize=4096)
def _counts(chances: tuple[float, ...], most: int) -> tuple[float, ...]:
    """Probabilities that 0 to `most` of these experts are chosen."""
    found = [1.0]
    for chance in chances:
        pairs = zip([*found, 0.0], [0.0, *found], strict=True)
        found = [(1 - chance) * stay + chance * more for stay, more in pairs][: most + 1]
    return tuple(found)


def _product(counts: Sequence[Sequence[float]], most: Sequence[int], total: int) -> float:
    """The probability that the counts add up to `total` and none is above its `most`."""
    found = [1.0]
    for own, limit in zip(counts, most, strict=True):
        longer = [0.0] * min(total + 1, len(found) + len(own))
        for before, part in enumerate(found):
            for count, chance in enumerate(own[: limit + 1]):
                if before + count <= total:
                    longer[before + count] += part * chance
        found = longer
    return found[total] if total < len(found) else 0.0
