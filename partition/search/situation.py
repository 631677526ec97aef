"""The facts of one search, computed once: devices by number, their paces, times of messages."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

from edge.partition.cost.contention import shares_host
from edge.partition.cost.estimate import TOKEN_BYTES, passing_stages_s
from edge.partition.cost.message_times import Network
from edge.partition.cost.overlap import stage_sum_s
from edge.partition.cost.pace import Pace, Phase, chunk_phase, decode_phase
from edge.partition.plan.facts import ClusterSpec, DeviceSpec, LayerFacts, ModelFacts, Workload

Group = tuple[int, ...]
"""Devices of a stage by number, in rank order."""

Arrangement = tuple[Group, ...]
"""The groups of the stages, first stage first; no layers or shares yet."""

Counts = tuple[int, ...]
"""For a run of layers: the number of layers of each of the model's shapes."""


class StageKey(NamedTuple):
    """One group as one stage: all facts that its options depend on."""

    group: Group
    is_first: bool
    is_last: bool
    crowded: frozenset[int]
    """Devices whose host also computes other stages during the chunks of a prompt."""


@dataclass(slots=True)
class Situation:
    """One model, workload and cluster, with every device measured. Caches what it computes."""

    model: ModelFacts
    cluster: ClusterSpec
    workload: Workload
    chunk_tokens: int
    devices: tuple[DeviceSpec, ...] = field(init=False)
    network: Network = field(init=False)
    decode: Phase = field(init=False)
    chunk: Phase = field(init=False)
    num_chunks: int = field(init=False)
    shapes: tuple[LayerFacts, ...] = field(init=False)
    """The distinct kinds of layers: kinds with equal facts are one shape."""
    shape_of_kind: tuple[int, ...] = field(init=False)
    sizes: tuple[int, ...] = field(init=False)
    """The size of a layer of each shape: 1 where there is one shape, else its bytes. Bounds of a
    stage's work are counted in sizes."""
    reached_size: tuple[int, ...] = field(init=False)
    """The summed sizes of the first n layers."""
    _reached: tuple[Counts, ...] = field(init=False)
    """Counts of the first n layers."""
    _unlinked: frozenset[tuple[int, int]] = field(init=False)
    """Pairs of devices that cannot reach each other, in both orders."""
    _paces: dict[tuple[int, int, bool, bool], Pace] = field(init=False, default_factory=dict)
    _hops: dict[tuple[Group, Group], tuple[float, float]] = field(init=False, default_factory=dict)
    _sums: dict[tuple[Group, bool], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.devices = self.cluster.devices
        self.network = Network(self.cluster)
        self._unlinked = frozenset(
            pair
            for pair in permutations(range(len(self.devices)), 2)
            if not self.network.is_linked(*self.ids(pair))
        )
        self.shapes = self.model.shapes
        self.shape_of_kind = tuple(map(self.shapes.index, self.model.kinds))
        is_uniform = len(self.shapes) == 1
        self.sizes = tuple(1 if is_uniform else max(1, each.weight_bytes) for each in self.shapes)
        shapes = [self.shape_of_kind[kind] for kind in self.model.layers]
        self.reached_size = tuple(accumulate((self.sizes[each] for each in shapes), initial=0))
        counts = [0] * len(self.shapes)
        reached = [tuple(counts)]
        for shape in shapes:
            counts[shape] += 1
            reached.append(tuple(counts))
        self._reached = tuple(reached)
        self.decode = decode_phase(self.workload)
        self.chunk, self.num_chunks = chunk_phase(self.workload, self.chunk_tokens)

    @property
    def steps(self) -> int:
        """Decoding steps of an answer, by which the time of a step is weighted against the first
        token's."""
        return self.workload.output_tokens

    def counts(self, start: int, stop: int) -> Counts:
        """The number of layers of each shape from `start` to before `stop`."""
        if len(self.shapes) == 1:
            return (stop - start,)
        pairs = zip(self._reached[start], self._reached[stop], strict=True)
        return tuple(after - before for before, after in pairs)

    def ids(self, group: Group) -> tuple[str, ...]:
        return tuple(self.devices[index].id for index in group)

    def row_bytes(self, stage: StageKey) -> int:
        """Bytes of one vocabulary row on such a stage: of the embedding, of the head, or both."""
        model = self.model
        return model.embedding_row_bytes * stage.is_first + model.head_row_bytes * stage.is_last

    def are_linked(self, arrangement: Arrangement) -> bool:
        """Whether the sampler reaches every device. Other pairs without a link show as an endless
        time of messages."""
        sampler = arrangement[-1][0]
        return not self._unlinked or not any(
            (sampler, index) in self._unlinked for group in arrangement for index in group
        )

    def crowded(self, arrangement: Arrangement) -> frozenset[int]:
        """Devices on whose host other stages compute at the same time, while a prompt is
        computed."""
        if not self.chunk.overlaps:
            return frozenset()
        found: set[int] = set()
        for group in arrangement:
            others = [self.devices[i] for each in arrangement if each != group for i in each]
            found |= {index for index in group if shares_host(others, self.devices[index])}
        return frozenset(found)

    def paces(
        self, group: Group, *, is_chunk: bool, crowded: frozenset[int] = frozenset()
    ) -> list[Pace]:
        """The pace of each device of a stage, in rank order; `crowded` counts in chunks only."""
        return [
            self._pace(index, group, is_chunk, is_chunk and index in crowded) for index in group
        ]

    def _pace(self, index: int, group: Group, is_chunk: bool, is_crowded: bool) -> Pace:
        key = (index, len(group), is_chunk, is_crowded)
        found = self._paces.get(key)
        if found is None:
            found = self._paces[key] = Pace.of(
                self.devices[index],
                self.chunk if is_chunk else self.decode,
                in_stage=len(group),
                is_crowded=is_crowded,
            )
        return found

    def sum_s(self, group: Group, *, is_chunk: bool) -> float:
        """Seconds of one sum of hidden states over the group; the order of ranks makes no
        difference."""
        key = (tuple(sorted(group)), is_chunk)
        found = self._sums.get(key)
        if found is None:
            phase = self.chunk if is_chunk else self.decode
            devices = [self.devices[index] for index in key[0]]
            found = self._sums[key] = stage_sum_s(self.network, self.model, devices, phase)
        return found

    def outside_s(self, arrangement: Arrangement) -> float:
        """Seconds of a whole answer outside the stages: hops and choosing tokens."""
        total_s = self._token_s(arrangement)
        for before, after in pairwise(arrangement):
            decode_s, chunk_s = self._hop_s(before, after)
            total_s += self.steps * decode_s + chunk_s
        return total_s

    def passing_s(self, arrangement: Arrangement) -> list[float]:
        """Seconds that each stage spends to receive and send a chunk."""
        nbytes = self.chunk.rows * self.model.wire_row_bytes
        return passing_stages_s(
            [
                self.network.hop_busy_s(self.ids(before), self.ids(after), nbytes)
                for before, after in pairwise(arrangement)
            ]
        )

    def _hop_s(self, before: Group, after: Group) -> tuple[float, float]:
        """Seconds of a hop: (in a decoding step, for a chunk)."""
        found = self._hops.get((before, after))
        if found is None:
            row_bytes = self.model.wire_row_bytes
            decode_s, chunk_s = (
                self.network.hop_s(self.ids(before), self.ids(after), phase.rows * row_bytes)
                for phase in (self.decode, self.chunk)
            )
            found = self._hops[before, after] = decode_s, chunk_s
        return found

    def _token_s(self, arrangement: Arrangement) -> float:
        sampler = arrangement[-1][0]
        rates = self.devices[sampler].rates
        assert rates is not None
        id = self.devices[sampler].id
        total_s = 0.0
        for weight, rows in ((self.steps, self.decode.head_rows), (1, self.chunk.head_rows)):
            told_s = max(
                (
                    self.network.message_s(id, self.devices[index].id, rows * TOKEN_BYTES)
                    for index in arrangement[0]
                    if index != sampler
                ),
                default=0.0,
            )
            total_s += weight * (rows * rates.sample_s + told_s)
        return total_s
