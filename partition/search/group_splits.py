"""The ways in which a group of devices can divide heads, columns and vocabulary rows.

A sum or a gather separates heads, columns and rows, so each of them is balanced on its own. Only
memory connects them: the caller says how many bytes each device has left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge.partition.cost.estimate import gather_latency_s
from edge.partition.cost.pace import Pace
from edge.partition.fit.memory import units_that_fit
from edge.partition.plan.facts import LayerFacts, ModelFacts
from edge.partition.plan.ranges import apportion
from edge.partition.search.balance import Cost, Split, all_splits, frontier
from edge.partition.search.head_balance import HeadCost, all_head_splits, head_frontier, kv_counts
from edge.partition.search.situation import Situation, StageKey

_ALL_SPLITS_UP_TO = 40
"""Up to this number of splits, `every` returns all; above, their frontier."""

ENDLESS_BYTES = 2**80
"""A room that is never full."""


@dataclass(slots=True)
class GroupSplits:
    """Splits over the ranks of one group of several devices, as one stage.

    Counts are numbers of heads, columns and rows. Seconds are those of one layer, or of the head.
    """

    situation: Situation
    stage: StageKey
    _paces: tuple[list[Pace], list[Pace]] = field(init=False)
    """Paces of each rank: when decoding, in a chunk."""

    def __post_init__(self) -> None:
        decode, chunk = (
            self.situation.paces(self.stage.group, is_chunk=is_chunk, crowded=self.stage.crowded)
            for is_chunk in (False, True)
        )
        self._paces = (decode, chunk)

    def fixed_s(self, layers: int, *, is_chunk: bool) -> float:
        """Seconds that do not depend on the shares: sums, graphs without weights, latency, the
        step."""
        situation, paces, stage = self.situation, self._paces[is_chunk], self.stage
        sums_s = (2 * layers + stage.is_first) * situation.sum_s(stage.group, is_chunk=is_chunk)
        bare_s = max(pace.bare().total_s for pace in paces) * (stage.is_first + (not stage.is_last))
        ids = situation.ids(stage.group)
        latency_s = gather_latency_s(situation.network, ids) if stage.is_last else 0.0
        return sums_s + bare_s + latency_s + max(pace.step_s for pace in paces)

    def heads(
        self,
        layer: LayerFacts,
        nbytes: HeadCost,
        rooms: Sequence[int] | None,
        *,
        every: bool = False,
        frugal: bool = False,
    ) -> list[Split]:
        """Splits of the query heads. nbytes: what they take of the rooms. rooms: None for no limit.

        every: all splits where they are few, also those that do not fit. frugal: the split with the
        fewest bytes in all, if one fits.
        """
        table = kv_counts(layer.num_heads, layer.num_kv_heads)
        decode, chunk = (_head_costs(layer, own) for own in self._paces)
        if rooms is None:
            rooms = [ENDLESS_BYTES] * len(decode)
        elif every:
            splits = all_head_splits(table, decode, chunk, most=_ALL_SPLITS_UP_TO)
            if splits is not None:
                return splits
        return head_frontier(table, decode, chunk, nbytes, rooms, frugal=frugal)

    def columns(
        self,
        layer: LayerFacts,
        column_bytes: int,
        rooms: Sequence[int] | None,
        *,
        every: bool = False,
    ) -> list[Split]:
        """Splits of the feed-forward columns at multiples; arguments as for `heads`.

        The remainder after the last multiple must be on the last device that has columns, so each
        device is tried as that one.
        """
        multiple = self.situation.model.column_multiple
        units, rest = divmod(layer.ffn_columns, multiple)
        unit_bytes = multiple * column_bytes
        count = len(self.stage.group)
        splits: list[Split] = []
        for holder in range(count) if rest else [count - 1]:
            rests = [rest * (rank == holder) for rank in range(count)]
            decode, chunk = (column_costs(layer, multiple, own, rests) for own in self._paces)
            caps = [units if rank <= holder else 0 for rank in range(count)]
            if rooms is not None:
                caps = [
                    units_that_fit(room - extra * column_bytes, unit_bytes, cap)
                    for room, extra, cap in zip(rooms, rests, caps, strict=True)
                ]
            if min(caps) < 0:
                continue
            found = (
                all_splits(units, decode, chunk, caps, most=_ALL_SPLITS_UP_TO) if every else None
            )
            if found is None:
                found = frontier(units, decode, chunk, caps, [0] * count)
            for split in found:
                sizes = [
                    number * multiple + extra
                    for number, extra in zip(split.counts, rests, strict=True)
                ]
                splits.append(Split(split.decode_s, split.chunk_s, tuple(sizes)))
        return splits

    def rows(
        self, row_bytes: int, rooms: Sequence[int] | None, least: Sequence[int]
    ) -> list[Split]:
        """Splits of the vocabulary with at least `least` rows each; no rows in middle stages."""
        count, model = len(self.stage.group), self.situation.model
        vocab = model.vocab_size
        if not (self.stage.is_first or self.stage.is_last):
            return [] if any(least) else [Split(0.0, 0.0, (0,) * count)]
        caps = [vocab] * count
        if rooms is not None:
            caps = [units_that_fit(room, row_bytes, vocab) for room in rooms]
        if self.stage.is_last:
            decode, chunk = (row_costs(model, own) for own in self._paces)
            return frontier(vocab, decode, chunk, caps, least)
        # Looking up an embedding takes hardly any time, so rows go where there is room.
        counts = apportion(vocab, [max(1, cap) for cap in caps], least=least, most=caps)
        return [] if counts is None else [Split(0.0, 0.0, tuple(counts))]


def _head_costs(layer: LayerFacts, paces: Sequence[Pace]) -> list[HeadCost]:
    return [
        HeadCost(
            pace.attention_from(layer).total_s,
            (layer.query_head_bytes * pace.weight_s + pace.head_s(layer)) * pace.slack,
            layer.kv_head_bytes * pace.weight_s * pace.slack,
            pace.attention(layer, 0, 0).total_s,
        )
        for pace in paces
    ]


def column_costs(
    layer: LayerFacts, multiple: int, paces: Sequence[Pace], rests: Sequence[int]
) -> list[Cost]:
    """The cost of each device, for `multiple` columns at a time and its remainder."""
    unit_bytes = multiple * layer.ffn_column_bytes
    return [
        Cost(
            pace.feed_forward_from(layer, extra).total_s,
            unit_bytes * pace.weight_s * pace.slack,
            pace.feed_forward(layer, extra).total_s,
        )
        for pace, extra in zip(paces, rests, strict=True)
    ]


def row_costs(model: ModelFacts, paces: Sequence[Pace]) -> list[Cost]:
    """The cost of each device for the logits of a row."""
    return [
        Cost(
            pace.head_from(model, 0).total_s,
            model.head_row_bytes * pace.head_weight_s * pace.slack,
            0.0,
        )
        for pace in paces
    ]
