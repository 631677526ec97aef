"""What it costs to run so many layers on one group of devices, and with which shares.

Shares are first balanced as if heads, columns and rows each had all memory: a bound that nothing
beats. Only where that does not fit are they looked at together, and only for the numbers of layers
that a search asks for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partition.search.balance import Split
from partition.search.group_splits import GroupSplits
from partition.search.head_balance import HeadCost, kv_counts, kv_of
from partition.search.situation import Group, Situation

_OPTIONS_KEPT = 4
"""Trade-offs between the two kinds of step kept for a stage, where the layers are many."""

_FEW_LAYERS = 16

_Parts = tuple[Split, Split, Split]
"""Heads, columns, rows."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage: its time in each kind of step, and who gets how much."""

    decode_s: float
    chunk_s: float
    heads: tuple[int, ...]
    columns: tuple[int, ...]
    rows: tuple[int, ...]
    """Vocabulary rows; all 0 in a stage between."""


class StageOptions:
    """The options of one group as one stage, by the number of its layers."""

    def __init__(
        self,
        situation: Situation,
        group: Group,
        *,
        is_first: bool,
        is_last: bool,
        crowded: frozenset[int],
    ) -> None:
        model = situation.model
        self._situation = situation
        self._group = group
        self._is_last = is_last
        self._crowded = crowded
        self._vocab = model.vocab_size if is_first or is_last else 0
        self._row_bytes = model.embedding_row_bytes * is_first + model.head_row_bytes * is_last
        self._splits: GroupSplits | None = None
        if len(group) > 1:
            self._splits = GroupSplits(situation, group, is_first, is_last, crowded)
        self._bounds: list[_Parts] | None = None
        self._found: dict[int, list[Option]] = {}
        self._settled: set[int] = set()

    def of(self, layers: int) -> Sequence[Option]:
        """The options for so many layers that no other beats in both kinds of step.

        Until `settle` was called they may not fit; then they are a bound of those that do.
        """
        if layers not in self._found:
            if self._splits is None:
                self._settled.add(layers)
                self._found[layers] = self._alone(layers)
            else:
                self._found[layers] = self._bound(self._splits, layers)
        return self._found[layers]

    def settle(self, layers: int) -> bool:
        """Make the options for so many layers ones that fit. Whether anything changed."""
        if layers in self._settled:
            return False
        assert self._splits is not None
        self._settled.add(layers)
        options = [option for option in self._found[layers] if self._fits(layers, option)]
        options += self._fitting(self._splits, layers)
        self._found[layers] = self._thinned(_undominated(options))
        return True

    def _rooms(self, layers: int) -> list[int]:
        """Bytes of each device beside the norms and biases of the layers."""
        fixed = layers * self._situation.model.layer_bytes
        return [self._situation.devices[index].memory_bytes - fixed for index in self._group]

    def _head_bytes(self, layers: int) -> HeadCost:
        """Query heads with their weights; KV heads with their weights and cache."""
        model = self._situation.model
        cache = self._situation.workload.cached_tokens * model.kv_bytes_per_token
        return HeadCost(
            0, layers * model.query_head_bytes, layers * (model.kv_head_bytes + cache), 0
        )

    def _least_bytes(self, layers: int) -> float:
        """What the stage takes beside norms and biases, nothing held twice."""
        model = self._situation.model
        return (
            self._head_bytes(layers).of(model.num_heads, model.num_kv_heads)
            + layers * model.ffn_columns * model.ffn_column_bytes
            + self._vocab * self._row_bytes
        )

    def _alone(self, layers: int) -> list[Option]:
        if self._least_bytes(layers) > self._rooms(layers)[0]:
            return []
        model = self._situation.model
        seconds: list[float] = []
        for is_chunk in (False, True):
            (pace,) = self._situation.paces(self._group, is_chunk=is_chunk, crowded=self._crowded)
            whole = pace.whole(model, layers, self._vocab if self._is_last else 0)
            seconds.append(whole.total_s + pace.step_s)
        heads, columns, rows = (model.num_heads,), (model.ffn_columns,), (self._vocab,)
        return [Option(seconds[0], seconds[1], heads, columns, rows)]

    def _bound(self, splits: GroupSplits, layers: int) -> list[Option]:
        """Every device with all its memory for each kind of share; settled if that fits."""
        rooms = self._rooms(layers)
        if min(rooms) < 0 or sum(rooms) < self._least_bytes(layers):
            self._settled.add(layers)
            return []
        if self._bounds is None:
            model = self._situation.model
            none = [0] * len(self._group)
            self._bounds = [
                (heads, columns, rows)
                for heads in splits.heads(HeadCost(0, 0, 0, 0), None)
                for columns in splits.columns(model.ffn_column_bytes, None)
                for rows in splits.rows(self._row_bytes, None, none)
            ]
        options = _undominated(self._option(splits, layers, parts) for parts in self._bounds)
        if all(self._fits(layers, option) for option in options):
            self._settled.add(layers)
        return self._thinned(options)

    def _fits(self, layers: int, option: Option) -> bool:
        """Whether memory suffices and nobody is idle."""
        left = self._left(layers, option.heads, option.columns)
        for room, *counts in zip(left, option.rows, option.heads, option.columns, strict=True):
            if counts[0] * self._row_bytes > room or not any(counts):
                return False
        return True

    def _left(self, layers: int, heads: Sequence[int], columns: Sequence[int]) -> list[int]:
        """Bytes of each device beside its heads and columns."""
        model, cost = self._situation.model, self._head_bytes(layers)
        held = kv_of(heads, kv_counts(model.num_heads, model.num_kv_heads))
        return [
            room - int(cost.of(count, kv)) - layers * size * model.ffn_column_bytes
            for room, count, kv, size in zip(self._rooms(layers), heads, held, columns, strict=True)
        ]

    def _fitting(self, splits: GroupSplits, layers: int) -> list[Option]:
        """Heads first, then columns, then rows, each within the room that is left.

        Where the splits of heads and columns are few, all are tried and nothing is missed. Of many,
        heads and columns take what they need and rows what is left; if that fails, heads take as
        few bytes as they can.
        """
        nbytes, rooms = self._head_bytes(layers), self._rooms(layers)
        options = list(self._filled(splits, layers, splits.heads(nbytes, rooms, every=True)))
        return options or list(self._filled(splits, layers, splits.frugal_heads(nbytes, rooms)))

    def _filled(
        self, splits: GroupSplits, layers: int, heads_splits: Iterable[Split]
    ) -> Iterator[Option]:
        column_bytes = layers * self._situation.model.ffn_column_bytes
        none = [0] * len(self._group)
        for heads in heads_splits:
            left = self._left(layers, heads.counts, none)
            if min(left) < 0:
                continue
            for columns in splits.columns(column_bytes, left, every=True):
                rest = self._left(layers, heads.counts, columns.counts)
                idle = [
                    int(not (count or size))
                    for count, size in zip(heads.counts, columns.counts, strict=True)
                ]
                for rows in splits.rows(self._row_bytes, rest, idle):
                    yield self._option(splits, layers, (heads, columns, rows))

    def _option(self, splits: GroupSplits, layers: int, parts: _Parts) -> Option:
        heads, columns, rows = parts
        return Option(
            layers * (heads.decode_s + columns.decode_s)
            + rows.decode_s
            + splits.fixed_s(layers, is_chunk=False),
            layers * (heads.chunk_s + columns.chunk_s)
            + rows.chunk_s
            + splits.fixed_s(layers, is_chunk=True),
            heads.counts,
            columns.counts,
            rows.counts,
        )

    def _thinned(self, options: list[Option]) -> list[Option]:
        if self._situation.num_chunks == 1:
            # Nothing waits for the slowest stage then, so only the sum counts.
            steps = self._situation.steps
            return sorted(options, key=lambda one: steps * one.decode_s + one.chunk_s)[:1]
        if self._situation.model.num_layers <= _FEW_LAYERS or len(options) <= _OPTIONS_KEPT:
            return options
        last = len(options) - 1
        return [options[index * last // (_OPTIONS_KEPT - 1)] for index in range(_OPTIONS_KEPT)]


def _undominated(options: Iterable[Option]) -> list[Option]:
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.decode_s, one.chunk_s)):
        if not kept or option.chunk_s < kept[-1].chunk_s:
            kept.append(option)
    return kept
