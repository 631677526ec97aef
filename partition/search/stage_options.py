"""The time of a number of layers on one group of devices, and the shares that give it.

First, heads, columns and rows are balanced as if each had all memory: a lower bound. Where that
does not fit, they are balanced together, and only for the numbers of layers that a search asks for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edge.partition.plan.facts import LayerFacts
from edge.partition.search.balance import Split, Way, thinned
from edge.partition.search.group_splits import GroupSplits
from edge.partition.search.head_balance import HeadCost, kv_counts, kv_of
from edge.partition.search.situation import Counts, Situation, StageKey

_Timed = TypeVar("_Timed", "LayerSplit", "_Layers", "Option")

_OPTIONS_KEPT = 4
"""Trade-offs between the two kinds of step that are kept for a stage of a model with many
layers."""

_FEW_LAYERS = 16

_WAYS_KEPT = 8
"""Ways to divide the layers of some shapes that are kept while the layers of other shapes are
added."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """One way to divide every layer of one shape: the seconds of one layer, and each device's
    part."""

    decode_s: float
    chunk_s: float
    heads: tuple[int, ...]
    columns: tuple[int, ...]

    def with_columns(self, columns: Split) -> "LayerSplit":
        """The same split of heads, with this split of columns."""
        return LayerSplit(
            self.decode_s + columns.decode_s,
            self.chunk_s + columns.chunk_s,
            self.heads,
            columns.counts,
        )


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage: its time in each kind of step, and each device's part."""

    decode_s: float
    chunk_s: float
    layers: tuple[LayerSplit, ...]
    """For each shape."""
    rows: tuple[int, ...]
    """Vocabulary rows of each device; all 0 in a middle stage."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """One way to divide the layers of some shapes, and the seconds of all of them."""

    decode_s: float
    chunk_s: float
    splits: tuple[LayerSplit, ...]

    def with_layers(self, count: int, split: LayerSplit) -> "_Layers":
        """The same, with `count` layers of a further shape."""
        return _Layers(
            self.decode_s + count * split.decode_s,
            self.chunk_s + count * split.chunk_s,
            (*self.splits, split),
        )


class StageOptions:
    """The options of one group as one stage, by the number of layers of each shape."""

    def __init__(self, situation: Situation, stage: StageKey) -> None:
        model = situation.model
        self._situation = situation
        self._stage = stage
        self._group = stage.group
        self._vocab = model.vocab_size if stage.is_first or stage.is_last else 0
        self._row_bytes = situation.row_bytes(stage)
        self._splits = GroupSplits(situation, stage) if len(stage.group) > 1 else None
        self._bounds: tuple[list[list[LayerSplit]], list[Split]] | None = None
        """The best splits without a memory limit: for each shape, and for the rows."""
        self._found: dict[Counts, list[Option]] = {}
        self._settled: set[Counts] = set()

    def of(self, counts: Counts) -> Sequence[Option]:
        """The options for `counts` layers of each shape that no other beats in both kinds of step.

        Before `settle` was called they may not fit; then they are a lower bound of those that do.
        """
        if counts not in self._found:
            if self._splits is None:
                self._settled.add(counts)
                self._found[counts] = self._alone(counts)
            else:
                self._found[counts] = self._bound(self._splits, counts)
        return self._found[counts]

    def settle(self, counts: Counts) -> bool:
        """Replace the options for `counts` layers by ones that fit. Returns whether anything
        changed."""
        if counts in self._settled:
            return False
        assert self._splits is not None
        self._settled.add(counts)
        options = [option for option in self._found[counts] if self._fits(counts, option)]
        options += self._fitting(self._splits, counts)
        self._found[counts] = self._thinned(_undominated(options))
        return True

    def _shapes(self, counts: Counts) -> list[tuple[LayerFacts, int]]:
        return list(zip(self._situation.shapes, counts, strict=True))

    def _rooms(self, counts: Counts) -> list[int]:
        """Bytes that the norms and biases of the layers leave each device."""
        fixed = sum(count * shape.layer_bytes for shape, count in self._shapes(counts))
        return [self._situation.devices[index].memory_bytes - fixed for index in self._group]

    def _head_bytes(self, shape: LayerFacts, count: int) -> HeadCost:
        """Query heads with their weights; KV heads with their weights and cache."""
        cache = shape.kept_bytes(self._situation.workload)
        return HeadCost(0, count * shape.query_head_bytes, count * (shape.kv_head_bytes + cache), 0)

    def _least_bytes(self, counts: Counts) -> float:
        """Bytes of the stage without norms and biases, nothing held twice."""
        return self._vocab * self._row_bytes + sum(
            self._head_bytes(shape, count).of(shape.num_heads, shape.num_kv_heads)
            + count * shape.feed_forward_bytes
            for shape, count in self._shapes(counts)
        )

    def _alone(self, counts: Counts) -> list[Option]:
        if self._least_bytes(counts) > self._rooms(counts)[0]:
            return []
        model, shapes = self._situation.model, self._shapes(counts)
        seconds: list[float] = []
        for is_chunk in (False, True):
            (pace,) = self._situation.paces(
                self._group, is_chunk=is_chunk, crowded=self._stage.crowded
            )
            whole = pace.whole(model, shapes, self._vocab if self._stage.is_last else 0)
            seconds.append(whole.total_s + pace.step_s)
        layers = tuple(
            LayerSplit(0.0, 0.0, (shape.num_heads,), (shape.ffn_columns,)) for shape, _ in shapes
        )
        return [Option(seconds[0], seconds[1], layers, (self._vocab,))]

    def _bound(self, splits: GroupSplits, counts: Counts) -> list[Option]:
        """The options if each kind of share had all memory of every device; settled if they fit."""
        rooms = self._rooms(counts)
        if min(rooms) < 0 or sum(rooms) < self._least_bytes(counts):
            self._settled.add(counts)
            return []
        if self._bounds is None:
            none = [0] * len(self._group)
            self._bounds = (
                [_layer_splits(splits, shape) for shape in self._situation.shapes],
                splits.rows(self._row_bytes, None, none),
            )
        of_shapes, all_rows = self._bounds
        ways = [_Layers(0.0, 0.0, ())]
        for count, own in zip(counts, of_shapes, strict=True):
            ways = self._some(
                _undominated(way.with_layers(count, each) for way in ways for each in own)
            )
        options = _undominated(
            self._option(splits, counts, way, rows) for way in ways for rows in all_rows
        )
        if all(self._fits(counts, option) for option in options):
            self._settled.add(counts)
        return self._thinned(options)

    def _fits(self, counts: Counts, option: Option) -> bool:
        """Whether memory suffices and no device is idle."""
        left = self._rooms(counts)
        for (shape, count), own in zip(self._shapes(counts), option.layers, strict=True):
            left = self._left(left, shape, count, own.heads, own.columns)
        for rank, (room, rows) in enumerate(zip(left, option.rows, strict=True)):
            is_idle = not rows and not any(
                own.heads[rank] or own.columns[rank] for own in option.layers
            )
            if rows * self._row_bytes > room or is_idle:
                return False
        return True

    def _left(
        self,
        rooms: Sequence[int],
        shape: LayerFacts,
        count: int,
        heads: Sequence[int],
        columns: Sequence[int],
    ) -> list[int]:
        """Bytes that these heads and columns of `count` layers leave each device."""
        cost = self._head_bytes(shape, count)
        held = kv_of(heads, kv_counts(shape.num_heads, shape.num_kv_heads))
        return [
            room - int(cost.of(own, kv)) - count * size * shape.ffn_column_bytes
            for room, own, kv, size in zip(rooms, heads, held, columns, strict=True)
        ]

    def _fitting(self, splits: GroupSplits, counts: Counts) -> list[Option]:
        """The options that fit: heads first, then columns, then rows, each within the room that is
        left.

        Where heads and columns have few splits, all are tried and no option is missed. Where they
        have many, heads and columns are placed first and rows get the rest; if that fails, heads
        take as few bytes as they can. Layers of several shapes have many splits, so some options
        are missed.
        """
        options = list(self._filled(splits, counts, frugal=False))
        return options or list(self._filled(splits, counts, frugal=True))

    def _filled(self, splits: GroupSplits, counts: Counts, *, frugal: bool) -> Iterator[Option]:
        none = (0,) * len(self._group)
        every = len(counts) == 1 and not frugal
        states: list[tuple[tuple[LayerSplit, ...], list[int]]] = [((), self._rooms(counts))]
        for shape, count in self._shapes(counts):
            nbytes = self._head_bytes(shape, count)
            found = []
            for layers, rooms in states:
                for heads in splits.heads(shape, nbytes, rooms, every=every, frugal=frugal):
                    left = self._left(rooms, shape, count, heads.counts, none)
                    if min(left) >= 0:
                        own = LayerSplit(heads.decode_s, heads.chunk_s, heads.counts, none)
                        found.append(((*layers, own), left))
            states = self._some(found)
        for number, (shape, count) in enumerate(self._shapes(counts)):
            column_bytes = count * shape.ffn_column_bytes
            found = []
            for layers, rooms in states:
                for columns in splits.columns(shape, column_bytes, rooms, every=len(counts) == 1):
                    whole = layers[number].with_columns(columns)
                    left = self._left(rooms, shape, count, none, columns.counts)
                    found.append(((*layers[:number], whole, *layers[number + 1 :]), left))
            states = self._some(found)
        for layers, rooms in states:
            idle = [
                int(not any(own.heads[rank] or own.columns[rank] for own in layers))
                for rank in range(len(self._group))
            ]
            way = _Layers(0.0, 0.0, ())
            for count, own in zip(counts, layers, strict=True):
                way = way.with_layers(count, own)
            for rows in splits.rows(self._row_bytes, rooms, idle):
                yield self._option(splits, counts, way, rows)

    def _option(self, splits: GroupSplits, counts: Counts, way: _Layers, rows: Split) -> Option:
        layers = sum(counts)
        return Option(
            way.decode_s + rows.decode_s + splits.fixed_s(layers, is_chunk=False),
            way.chunk_s + rows.chunk_s + splits.fixed_s(layers, is_chunk=True),
            way.splits,
            rows.counts,
        )

    def _some(self, ways: list[Way]) -> list[Way]:
        """All ways where layers have one shape, else some from first to last."""
        return ways if len(self._situation.shapes) == 1 else thinned(ways, _WAYS_KEPT)

    def _thinned(self, options: list[Option]) -> list[Option]:
        if self._situation.num_chunks == 1:
            # With one chunk nothing waits for the slowest stage, so only the sum counts.
            steps = self._situation.steps
            return sorted(options, key=lambda one: steps * one.decode_s + one.chunk_s)[:1]
        is_small = self._situation.model.num_layers <= _FEW_LAYERS
        return options if is_small else thinned(options, _OPTIONS_KEPT)


def _layer_splits(splits: GroupSplits, shape: LayerFacts) -> list[LayerSplit]:
    """The best splits without a memory limit."""
    return _undominated(
        LayerSplit(heads.decode_s, heads.chunk_s, heads.counts, ()).with_columns(columns)
        for heads in splits.heads(shape, HeadCost(0, 0, 0, 0), None)
        for columns in splits.columns(shape, shape.ffn_column_bytes, None)
    )


def _undominated(ways: Iterable[_Timed]) -> list[_Timed]:
    kept: list[_Timed] = []
    for way in sorted(ways, key=lambda one: (one.decode_s, one.chunk_s)):
        if not kept or way.chunk_s < kept[-1].chunk_s:
            kept.append(way)
    return kept
