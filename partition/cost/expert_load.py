"""What devices have to do where each has some of a layer's experts whole.

A token goes through few experts, and which ones is known only when it comes: of those that it goes
through one device has more, another fewer, and a stage waits for the one that is done last. Pure.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from edge.partition.plan.facts import LayerFacts, ModelFacts
from edge.partition.plan.plan import Stage


def chances(model: ModelFacts, layer: int) -> tuple[float, ...]:
    """For each of the layer's experts the part of all tokens that go through it."""
    facts = model.kinds[model.layers[layer]]
    if model.expert_uses:
        return model.expert_uses[layer]
    return (facts.top_k / facts.num_experts,) * facts.num_experts if facts.num_experts else ()


def chances_held(stage: Stage, model: ModelFacts, layer: int) -> tuple[tuple[float, ...], ...]:
    """The same for those that each shard of the stage has."""
    every, index = chances(model, layer), layer - stage.layers.start
    return tuple(
        tuple(every[number] for number in shard.experts[index]) if shard.experts else ()
        for shard in stage.slices
    )


def load(chances: Sequence[float], facts: LayerFacts) -> float:
    """The part of all that a layer's experts do which these do, on average."""
    return sum(chances) / facts.top_k


@lru_cache(maxsize=1024)
def expected_slowest(
    others_s: tuple[float, ...],
    expert_s: tuple[float, ...],
    chances: tuple[tuple[float, ...], ...],
    top_k: int,
) -> float:
    """Seconds until every device has computed its part of what one token goes through, on average.

    others_s, expert_s: by device, what it does anyway, and for each expert. chances: by device, of
    each expert that it has. Experts are taken to be chosen independently, but `top_k` of them
    (conditional Poisson sampling, Hajek, 1964): the mean of a maximum, over the values that it may
    have.
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
    """For 0 to `most` of them: how likely it is that this many are chosen."""
    found = [1.0]
    for chance in chances:
        pairs = zip([*found, 0.0], [0.0, *found], strict=True)
        found = [(1 - chance) * stay + chance * more for stay, more in pairs][: most + 1]
    return tuple(found)


def _product(counts: Sequence[Sequence[float]], most: Sequence[int], total: int) -> float:
    """How likely it is that all are `total` together, and none is more than its `most`."""
    found = [1.0]
    for own, limit in zip(counts, most, strict=True):
        longer = [0.0] * min(total + 1, len(found) + len(own))
        for before, part in enumerate(found):
            for count, chance in enumerate(own[: limit + 1]):
                if before + count <= total:
                    longer[before + count] += part * chance
        found = longer
    return found[total] if total < len(found) else 0.0
