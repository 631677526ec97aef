"""Repaired plans in which the remaining devices keep their shards, and these grow.

Slices of a lost rank go to the ranks beside it, and layers of a lost stage to the stages beside it,
so only lost weights move. Several cuts between two neighbours are tried.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from edge.partition.fit.memory import units_that_fit
from edge.partition.plan.facts import DeviceSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.ranges import apportion, consecutive, largest_remainders
from edge.partition.plan.shard import LayerSlice, Shard
from edge.partition.search.balance import thinned

_PARTS = 8
"""A lost slice is cut between two ranks at multiples of 1 / _PARTS."""

_MOST_CUTS = 16
"""Cuts of a lost stage's layers that are tried, spread evenly over all."""

Seats = Sequence[Sequence[Shard | None]]
"""The shards of each stage in rank order; None for an empty seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closer:
    """Closes the empty seats of one plan."""

    plan: Plan
    model: ModelFacts
    devices: Mapping[str, DeviceSpec]
    workload: Workload

    def ways(self, seats: Seats, *, most: int) -> Iterator[Plan]:
        """At most `most` valid plans without the empty seats. They may not fit the memory.

        No plan where every seat is empty.
        """
        groups: list[list[tuple[Shard, ...]]] = []
        layers: list[range] = []
        runs: list[tuple[int, range]] = []
        """Layers of empty stages, each with the number of `groups` before them."""
        for stage, shards in zip(self.plan.stages, seats, strict=True):
            if any(shards):
                groups.append(self._grown(stage, shards))
                layers.append(stage.layers)
            elif runs and runs[-1][0] == len(groups):
                number, lost = runs.pop()
                runs.append((number, range(lost.start, stage.layers.stop)))
            else:
                runs.append((len(groups), stage.layers))
        if not groups:
            return
        cuts = [self._cuts(number, lost, groups, layers) for number, lost in runs]
        choices = sum(len(way) > 1 for way in groups) + sum(len(way) > 1 for way in cuts)
        kept = max(2, int(most ** (1 / max(1, choices))))
        every = product(
            product(*(thinned(way, kept) for way in groups)),
            product(*(thinned(way, kept) for way in cuts)),
        )
        for shards_of, cuts_of in islice(every, most):
            closed = list(layers)
            for (number, lost), cut in zip(runs, cuts_of, strict=True):
                if number > 0:
                    closed[number - 1] = range(closed[number - 1].start, cut)
                if number < len(closed):
                    closed[number] = range(cut, closed[number].stop)
                assert lost.start <= cut <= lost.stop
            stages = tuple(
                Stage(layers=own, shards=shards if own == before else _by_columns(shards))
                for own, before, shards in zip(closed, layers, shards_of, strict=True)
            )
            yield self._with_rows(replace(self.plan, stages=stages))

    def _grown(self, stage: Stage, shards: Sequence[Shard | None]) -> list[tuple[Shard, ...]]:
        """Ways to divide all slices of the stage among the remaining ranks."""
        before = stage.slices
        ways: list[list[Shard]] = [[]]
        lost: list[Shard] = []
        for rank, shard in enumerate(shards):
            if shard is None:
                lost.append(before[rank])
                continue
            ways = [
                [*way[:-1], *grown]
                for way in ways
                for grown in self._between(way[-1] if way else None, lost, shard, stage.layers)
            ]
            ways, lost = thinned(ways, 2 * _PARTS), []
        ways = [
            [*way[:-1], *grown]
            for way in ways
            for grown in self._between(way[-1], lost, None, stage.layers)
        ]
        return list(dict.fromkeys(map(tuple, ways)))

    def _between(
        self, left: Shard | None, lost: Sequence[Shard], right: Shard | None, layers: range
    ) -> list[list[Shard]]:
        """Ways to divide the lost shards between the two neighbours."""
        both = [each for each in (left, right) if each is not None]
        if not lost:
            return [both]
        if left is None or right is None:
            only = left or right
            assert only is not None
            return [[self._with_lost(only, lost, 1.0 if right is None else 0.0, right is None)]]
        parts = [self._fair_part(left, lost, right, layers)]
        parts += [part / _PARTS for part in range(_PARTS + 1)]
        return [
            [self._with_lost(left, lost, part, True), self._with_lost(right, lost, part, False)]
            for part in dict.fromkeys(parts)
        ]

    def _fair_part(self, left: Shard, lost: Sequence[Shard], right: Shard, layers: range) -> float:
        """The part of the lost slices that the left shard takes, such that both become equally
        fast."""
        own, gap, other = (
            sum(self._bytes(shard, layers) for shard in shards)
            for shards in ([left], lost, [right])
        )
        fast, other_fast = self._speed(left.device), self._speed(right.device)
        wished = fast * (own + gap + other) / (fast + other_fast) - own
        return min(1.0, max(0.0, wished / gap)) if gap else 0.0

    def _bytes(self, shard: Shard, layers: range) -> int:
        rows = len(shard.vocab) * self.model.head_row_bytes
        return rows + sum(
            count * part.matrix_bytes(facts)
            for part, facts, count in shard.counted(layers, self.model)
        )

    def _with_lost(self, shard: Shard, lost: Sequence[Shard], part: float, is_left: bool) -> Shard:
        """The shard with its part of the lost ones: it grows to the right by `part` of them
        (`is_left`), or to the left by the rest."""

        def grown(own: range, gaps: Sequence[range], multiple: int = 1) -> range:
            gaps = [each for each in gaps if each]
            if not gaps:
                return own
            start, stop = gaps[0].start, gaps[-1].stop
            units = math.ceil((stop - start) / multiple)
            cut = min(stop, start + round(part * units) * multiple)
            if cut == (start if is_left else stop):
                return own
            if is_left:
                return range(own.start if own else start, cut)
            return range(cut, own.stop if own else stop)

        kinds = range(len(self.model.kinds))
        slices = [
            LayerSlice(
                heads=grown(shard.slice(k).heads, [each.slice(k).heads for each in lost]),
                ffn_columns=grown(
                    shard.slice(k).ffn_columns,
                    [each.slice(k).ffn_columns for each in lost],
                    self.model.column_multiple,
                ),
            )
            for k in kinds
        ]
        whole = Shard.of_slices(
            shard.device,
            slices,
            vocab=grown(shard.vocab, [each.vocab for each in lost]),
            streamed_layers=shard.streamed_layers,
        )
        return whole.with_experts(_with_lost_experts(shard, lost, part, is_left))

    def _cuts(
        self,
        number: int,
        lost: range,
        groups: Sequence[Sequence[tuple[Shard, ...]]],
        layers: Sequence[range],
    ) -> list[int]:
        """Layers at which a run of lost layers may be cut between two stages. At the first or last
        stage there is one cut, which gives its neighbour everything."""
        if number == 0:
            return [lost.start]
        if number == len(groups):
            return [lost.stop]
        before, after = layers[number - 1], layers[number]
        fast, other_fast = (
            sum(self._speed(shard.device) for shard in groups[index][0])
            for index in (number - 1, number)
        )
        fair = before.start + round(fast / (fast + other_fast) * (after.stop - before.start))
        every = thinned(range(lost.start, lost.stop + 1), _MOST_CUTS)
        return sorted({*every, min(lost.stop, max(lost.start, fair))})

    def _with_rows(self, plan: Plan) -> Plan:
        """The plan with vocabulary rows also in a stage that became the first or last one, where
        they fit."""
        stages = list(plan.stages)
        for number in {0, len(stages) - 1}:
            shards = stages[number].slices
            if any(shard.vocab for shard in shards):
                continue
            place = plan.place(number)
            row_bytes = self.model.embedding_row_bytes * place.is_first
            row_bytes += self.model.head_row_bytes * place.is_last
            rooms = [
                (device := self.devices[shard.device]).memory_bytes
                - shard.memory(place, self.model, self.workload).on(device).total
                for shard in shards
            ]
            speeds = [self._speed(shard.device) for shard in shards]
            counts = apportion(
                self.model.vocab_size,
                speeds,
                least=[0] * len(shards),
                most=[units_that_fit(room, row_bytes, self.model.vocab_size) for room in rooms],
            )
            if counts is None:  # they may fit once layers are read from disk
                counts = largest_remainders(self.model.vocab_size, speeds)
            stages[number] = replace(
                stages[number],
                shards=tuple(
                    replace(shard, vocab=rows)
                    for shard, rows in zip(shards, consecutive(counts), strict=True)
                ),
            )
        return replace(plan, stages=tuple(stages))

    def _speed(self, id: str) -> int:
        """Bytes of weights per second, or threads if a device was not measured."""
        if any(device.rates is None for device in self.devices.values()):
            return self.devices[id].threads
        rates = self.devices[id].rates
        assert rates is not None
        return max(1, round(1 / max(1e-15, rates.seconds_per_byte[0])))


def _by_columns(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """The shards with experts cut by columns: of new layers, no whole experts are known."""
    return tuple(shard.with_experts(()) for shard in shards)


def _with_lost_experts(
    shard: Shard, lost: Sequence[Shard], part: float, is_left: bool
) -> tuple[tuple[int, ...], ...]:
    """The shard's whole experts in each layer, with its part of the lost ones."""
    before = shard.experts or ((),) * max(len(each.experts) for each in lost)
    experts = []
    for index, own in enumerate(before):
        free = sorted(number for each in lost if each.experts for number in each.experts[index])
        cut = round(part * len(free))
        experts.append(tuple(sorted((*own, *(free[:cut] if is_left else free[cut:])))))
    return tuple(experts)
