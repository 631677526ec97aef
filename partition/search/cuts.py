"""How many layers each stage of an arrangement gets: dynamic programming over the cuts.

The time of an answer is the sum over the stages. Every further chunk of the prompt adds the time of
the slowest stage, with receiving and sending. So a label has two numbers, and at each cut the
labels are kept that no other beats in both.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from edge.partition.search.balance import thinned
from edge.partition.search.situation import Situation
from edge.partition.search.stage_bound import StageBound
from edge.partition.search.stage_options import Option, StageOptions

_LABELS_KEPT = 4
"""Labels kept at a cut of a model with many layers."""

_FEW_LAYERS = 16

_NEARBY_LAYERS = 6
"""When a search is repeated for a model with many layers, a stage may grow or shrink by this many
layers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Layers and shares of every stage, and the seconds of an answer without its hops."""

    total_s: float
    stages: tuple[tuple[int, Option], ...]


@dataclass(frozen=True, slots=True)
class _Label:
    sum_s: float
    slowest_s: float
    layers: int
    option: Option | None
    before: "_Label | None"


def best_cut(
    situation: Situation,
    stages: Sequence[StageOptions],
    bounds: Sequence[StageBound],
    passing_s: Sequence[float],
    *,
    beat_s: float,
) -> Cut | None:
    """The fastest way to give all layers to these stages, or None when none beats `beat_s`.

    passing_s: seconds that each stage spends to receive and send a chunk.

    Where stage options turn out too large for memory, exact ones are computed (`settle`) and the
    search is repeated, so the result fits. For many layers, the repeated search stays near the cuts
    before, and covers everything only if nothing fits there.
    """
    has_few = situation.model.num_layers <= _FEW_LAYERS
    near: Sequence[range] | None = None
    while True:
        cut = _search(situation, stages, bounds, passing_s, beat_s, near)
        if cut is None and near is not None:
            cut = _search(situation, stages, bounds, passing_s, beat_s, None)
        if cut is None:
            return None
        if not has_few:
            near = [
                range(layers - _NEARBY_LAYERS, layers + _NEARBY_LAYERS + 1)
                for layers, _ in cut.stages
            ]
        ends = list(accumulate(layers for layers, _ in cut.stages))
        changed = [
            stage.settle(situation.counts(stop - layers, stop))
            for stage, stop, (layers, _) in zip(stages, ends, cut.stages, strict=True)
        ]
        if not any(changed):
            return cut


def _search(
    situation: Situation,
    stages: Sequence[StageOptions],
    bounds: Sequence[StageBound],
    passing_s: Sequence[float],
    beat_s: float,
    near: Sequence[range] | None,
) -> Cut | None:
    num_layers, more_chunks = situation.model.num_layers, situation.num_chunks - 1
    sizes = situation.reached_size
    whole = sizes[-1]
    reached: dict[int, list[_Label]] = {0: [_Label(0.0, 0.0, 0, None, None)]}
    for number, (stage, bound) in enumerate(zip(stages, bounds, strict=True)):
        later = bounds[number + 1 :]
        rest_base_s = sum(each.base_s for each in later)
        rest_layer_s = min((each.layer_s for each in later), default=0.0)
        rest_begins = bisect_left(sizes, whole - sum(each.most for each in later))
        found: dict[int, list[_Label]] = {}
        for used, labels in reached.items():
            low = max(1, rest_begins - used)
            reach = bisect_right(sizes, sizes[used] + bound.most) - 1 - used
            high = min(reach, num_layers - used - len(later))
            if near is not None:
                low, high = max(low, near[number].start), min(high, near[number].stop - 1)
            for layers in range(low, high + 1):
                options = stage.of(situation.counts(used, used + layers))
                rest_s = rest_base_s + (whole - sizes[used + layers]) * rest_layer_s
                for option in options:
                    own_s = situation.steps * option.decode_s + option.chunk_s
                    for label in labels:
                        sum_s = label.sum_s + own_s
                        slowest_s = max(label.slowest_s, option.chunk_s + passing_s[number])
                        if sum_s + more_chunks * slowest_s + rest_s < beat_s:
                            found.setdefault(used + layers, []).append(
                                _Label(sum_s, slowest_s, layers, option, label)
                            )
        reached = found  # after the last stage the best is taken, so none is thinned out
        if later:
            reached = {used: _undominated(situation, labels) for used, labels in found.items()}
    best = min(
        reached.get(num_layers, []),
        key=lambda label: label.sum_s + more_chunks * label.slowest_s,
        default=None,
    )
    if best is None:
        return None
    chosen: list[tuple[int, Option]] = []
    total_s, label = best.sum_s + more_chunks * best.slowest_s, best
    while label.before is not None:
        assert label.option is not None
        chosen.append((label.layers, label.option))
        label = label.before
    return Cut(total_s, tuple(reversed(chosen)))


def _undominated(situation: Situation, labels: list[_Label]) -> list[_Label]:
    if situation.num_chunks == 1:
        return [min(labels, key=lambda label: label.sum_s)]
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda one: (one.sum_s, one.slowest_s)):
        if not kept or label.slowest_s < kept[-1].slowest_s:
            kept.append(label)
    return kept if situation.model.num_layers <= _FEW_LAYERS else thinned(kept, _LABELS_KEPT)
