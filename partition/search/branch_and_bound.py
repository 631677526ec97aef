"""The search for the arrangement, cuts and shares with the least time of a whole answer.

Up to `EXACT_DEVICES` devices: branch and bound over all arrangements. Each arrangement has a lower
bound of its time. They are solved in the order of their bounds, until the next bound is no better
than the best solution. The search is exact for few layers and pieces. With many, trade-offs between
the first token and the rest are thinned (see `balance`, `stage_options`, `cuts`), and where memory
is short, heads and columns are placed before rows. At most `MOST_SOLVED` arrangements are solved.

More devices: a descent through neighbouring arrangements, from several starts and by the same
bounds. The best arrangements found are solved. The result is not exact, but never worse than any of
the starts, among them the best single device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from edge.partition.cost.estimate import Estimate, estimate
from edge.partition.cost.message_times import NO_LINK_S
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.ranges import consecutive
from edge.partition.plan.shard import LayerSlice, Shard
from edge.partition.search.arrangements import canonical, is_canonical, twins
from edge.partition.search.cuts import Cut, best_cut
from edge.partition.search.situation import Arrangement, Situation, StageKey
from edge.partition.search.stage_bound import StageBound, layers_bound_s, stage_bound
from edge.partition.search.stage_options import StageOptions

EXACT_DEVICES = 5

MOST_SOLVED = 120
"""Arrangements solved at most, of few devices."""

MOST_SOLVED_OF_MANY = 6
"""Arrangements solved at most, of more devices than `EXACT_DEVICES`."""

_MOST_FAILED = 4
"""While no arrangement fits, at most this many times as many are tried. Then plans by memory are
used (`placement`)."""

_MOST_BOUNDED = 1500
"""The most arrangements that a descent from one start looks at."""

_RUNNERS_UP = 5
"""A search goes on until it has solved arrangements of this many different groups."""

_NEARLY_ONE = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Solved:
    """An arrangement with its best cuts and shares."""

    arrangement: Arrangement
    total_s: float
    """Seconds of a whole answer."""
    cut: Cut

    @property
    def num_devices(self) -> int:
        return sum(len(group) for group in self.arrangement)


@dataclass(slots=True)
class Search:
    """Bounds and solutions of arrangements in one situation; each is computed once."""

    situation: Situation
    _options: dict[StageKey, StageOptions] = field(init=False, default_factory=dict)
    _bounds: dict[StageKey, StageBound] = field(init=False, default_factory=dict)

    def bound_s(self, arrangement: Arrangement) -> float:
        """A lower bound of the seconds of a whole answer with this arrangement.

        Infinite where memory is short or devices cannot reach each other.
        """
        if not self.situation.are_linked(arrangement):
            return float("inf")
        bounds = [self._bound(key) for key in self._keys(arrangement)]
        whole, smallest = self.situation.reached_size[-1], min(self.situation.sizes)
        if min(bound.most for bound in bounds) < smallest:
            return float("inf")
        most = sum(bound.most for bound in bounds)
        if len(bounds) > self.situation.model.num_layers or most < whole:
            return float("inf")
        more_chunks = self.situation.num_chunks - 1
        least_s = layers_bound_s(bounds, whole, smallest, more_chunks)
        total_s = self.situation.outside_s(arrangement) + least_s
        return total_s if total_s < NO_LINK_S else float("inf")

    def solve(self, arrangement: Arrangement, *, beat_s: float = float("inf")) -> Solved | None:
        """The best cuts and shares, or None when there are none that fit and beat `beat_s`."""
        keys = self._keys(arrangement)
        outside_s = self.situation.outside_s(arrangement)
        if len(keys) > self.situation.model.num_layers:
            return None
        cut = best_cut(
            self.situation,
            [self._stage(key) for key in keys],
            [self._bound(key) for key in keys],
            self.situation.passing_s(arrangement),
            beat_s=beat_s - outside_s,
        )
        if cut is None:
            return None
        return Solved(arrangement, outside_s + cut.total_s, cut)

    def best(
        self, arrangements: Iterable[Arrangement], *, most: int, nearly: float = 0.0
    ) -> list[Solved]:
        """The best of these arrangements and runners-up, best first; empty when nothing fits.

        Ties go to fewer devices, then to the earlier arrangement. nearly: arrangements of fewer
        devices that may be slower than the best by up to this part are solved as well.
        """
        twin_of = twins(self.situation)
        bounded = sorted(
            (bound_s, sum(map(len, arrangement)), number, arrangement)
            for number, arrangement in enumerate(arrangements)
            if is_canonical(arrangement, twin_of)
            and (bound_s := self.bound_s(arrangement)) < float("inf")
        )
        solved: list[Solved] = []
        kinds: set[tuple[frozenset[int], ...]] = set()
        best_s, fewest, tries = float("inf"), 0, 0
        for bound_s, count, _, arrangement in bounded:
            if tries >= (most if solved else _MOST_FAILED * most):
                break
            enough = len(kinds) >= _RUNNERS_UP
            beat_s = best_s if enough else float("inf")
            if bound_s > best_s * _NEARLY_ONE and (enough or tries >= most // 2):
                if bound_s > best_s * (1 + nearly):
                    break
                if count >= fewest:
                    continue
                beat_s = best_s * (1 + nearly)
            tries += 1
            found = self.solve(arrangement, beat_s=beat_s)
            if found is not None:
                solved.append(found)
                kinds.add(kind(arrangement))
                if found.total_s < best_s:
                    best_s, fewest = found.total_s, count
        return in_order(solved)

    def descend(self, starts: Sequence[Arrangement], moves: "Moves") -> list[Arrangement]:
        """The arrangements on the descents from these starts, by their bounds, best first.

        Of arrangements that differ by exchanged twins only, the one with the earlier twin first.
        """
        twin_of = twins(self.situation)
        seen: dict[Arrangement, float] = {}

        def value(arrangement: Arrangement) -> float:
            if arrangement not in seen:
                seen[arrangement] = self.bound_s(arrangement)
            return seen[arrangement]

        for start in starts:
            here, is_better = canonical(start, twin_of), True
            most = len(seen) + _MOST_BOUNDED
            while is_better and len(seen) < most:
                near = (canonical(each, twin_of) for each in moves(here))
                better = (each for each in near if value(each) < value(here) * _NEARLY_ONE)
                found = next(better, None)
                is_better = found is not None
                here = found or here
        return sorted(seen, key=lambda one: seen[one])

    def plan(self, solved: Solved) -> Plan:
        model = self.situation.model
        stages: list[Stage] = []
        start = 0
        for group, (layers, option) in zip(solved.arrangement, solved.cut.stages, strict=True):
            cuts = [
                (consecutive(layer.heads), consecutive(layer.columns))
                for layer in map(option.layers.__getitem__, self.situation.shape_of_kind)
            ]
            shards = tuple(
                Shard.of_slices(
                    id,
                    [
                        LayerSlice(heads=heads[rank], ffn_columns=columns[rank])
                        for heads, columns in cuts
                    ],
                    vocab=rows,
                )
                for rank, (id, rows) in enumerate(
                    zip(self.situation.ids(group), consecutive(option.rows), strict=True)
                )
            )
            stages.append(Stage(layers=range(start, start + layers), shards=shards))
            start += layers
        return Plan(model=model.name, version=1, stages=tuple(stages))

    def estimate(self, plan: Plan) -> Estimate:
        situation = self.situation
        return estimate(
            plan,
            situation.model,
            situation.cluster,
            situation.workload,
            chunk_tokens=situation.chunk_tokens,
        )

    def total_s(self, planned: tuple[Plan, Estimate]) -> float:
        """Seconds of a whole answer, rounded so that rounding errors do not decide."""
        return _rounded(planned[1].total_s(self.situation.workload))

    def _keys(self, arrangement: Arrangement) -> list[StageKey]:
        crowded = self.situation.crowded(arrangement)
        last = len(arrangement) - 1
        return [
            StageKey(group, number == 0, number == last, crowded.intersection(group))
            for number, group in enumerate(arrangement)
        ]

    def _stage(self, key: StageKey) -> StageOptions:
        if key not in self._options:
            self._options[key] = StageOptions(self.situation, key)
        return self._options[key]

    def _bound(self, key: StageKey) -> StageBound:
        group = key.group
        ordered = (group[0], *sorted(group[1:])) if key.is_last else tuple(sorted(group))
        key = key._replace(group=ordered)
        if key not in self._bounds:
            self._bounds[key] = stage_bound(self.situation, key)
        return self._bounds[key]


Moves = Callable[[Arrangement], Iterator[Arrangement]]


def kind(arrangement: Arrangement) -> tuple[frozenset[int], ...]:
    """An arrangement without the order of its ranks. Arrangements of one kind count as one plan."""
    return tuple(frozenset(group) for group in arrangement)


def in_order(solved: Iterable[Solved]) -> list[Solved]:
    """The best first; of equals the one with fewer devices, then the one that came first."""
    return sorted(solved, key=lambda one: (_rounded(one.total_s), one.num_devices))


def _rounded(seconds: float) -> float:
    """Seconds to ten digits, so that nearly all times that differ by rounding errors become
    equal."""
    return float(f"{seconds:.10g}")
