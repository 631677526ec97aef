"""How fast a plan will be, from measured rates: one function per term, formulas in COST.md.

A step is a chain of parts that wait for each other, so its time is a sum. Of shards that work side
by side, the slowest counts. Pure arithmetic over facts; searches nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from edge.partition.cost.contention import shares_host
from edge.partition.cost.expert_load import chances_held, expected_slowest, load
from edge.partition.cost.message_times import Network
from edge.partition.cost.overlap import stage_sum_s
from edge.partition.cost.pace import (
    CHUNK_TOKENS,
    Pace,
    Phase,
    Segment,
    chunk_phase,
    decode_phase,
    draft_phase,
)
from edge.partition.cost.terms import Kind, Term, in_words, merged
from edge.partition.errors import PlanError
from edge.partition.fit.memory import memory_use
from edge.partition.fit.streamed_layers import Load, loads_of, waits_for_disk, while_decoding
from edge.partition.plan.facts import ClusterSpec, LayerFacts, ModelFacts, Workload
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.shard import LayerSlice, num_local_kv_heads
from edge.partition.plan.share import Share

TOKEN_BYTES = 8

_MANY_ROWS = 32
"""In steps of more rows, all devices have about the average number of tokens for their experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How fast a plan will be."""

    first_token_s: float
    """From a prompt of the workload to its first token, with no other request."""
    token_s: float
    """A step in which every request gets a token."""
    tokens_per_s: float
    """All requests together, while they decode."""
    terms: tuple[Term, ...]
    """The parts of `token_s`, which is their sum; the largest first."""
    bottleneck: str
    """The largest term, in words."""
    device_s: tuple[tuple[str, float], ...]
    """Seconds that each device (by id, in plan order) computes for a step."""
    tokens_per_s_range: tuple[float, float]
    """(low, high) `tokens_per_s` where devices are as slow or as fast as in the slowest or fastest
    fifth of their measurements. Speed varies from minute to minute."""

    def total_s(self, workload: Workload) -> float:
        """Seconds of a whole answer of the workload, by which plans are compared."""
        return self.first_token_s + workload.output_tokens * self.token_s


def estimate(
    plan: Plan,
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Estimate:
    """How fast `plan` runs this workload, prompts in chunks of `chunk_tokens`.

    PlanError when the plan is not for this model and cluster, or a device of it has no rates.
    """
    _check(plan, model, cluster)
    decode = decode_phase(workload)
    view, terms = _decode_step(plan, model, cluster, workload, decode)
    token_s = sum(term.seconds for term in terms)
    chunk, num_chunks = chunk_phase(workload, chunk_tokens)
    stages_s = view.stage_seconds(chunk)
    # A chunk reads what a step of as many rows reads; a stage waits for the slowest of its disks.
    rows = max(1, round(chunk.rows))
    in_chunks = replace(workload, concurrency=rows, expert_hits=None)
    waited = dict(waits_for_disk(plan, cluster, memory_use(plan, model, in_chunks), stages_s))
    stages_s = [
        own_s + max(waited[shard.device] for shard in stage.shards)
        for own_s, stage in zip(stages_s, plan.stages, strict=True)
    ]
    passing_s = passing_stages_s(view.hops_s(chunk, view.network.hop_busy_s))
    first_token_s = (
        sum(stages_s)
        + (num_chunks - 1) * max(map(sum, zip(stages_s, passing_s, strict=True)))
        + sum(term.seconds for term in view.outside_stages(chunk))
    )
    shards_s = view.shards_s(decode)
    device_s: dict[str, float] = {}
    for device, seconds in chain(*shards_s):
        device_s[device] = device_s.get(device, 0.0) + seconds
    fast_s, slow_s = view.spread_s(shards_s)
    return Estimate(
        first_token_s=first_token_s,
        token_s=token_s,
        tokens_per_s=workload.concurrency / token_s if token_s else float("inf"),
        terms=terms,
        bottleneck=in_words(terms[0], token_s),
        device_s=tuple(device_s.items()),
        tokens_per_s_range=(
            workload.concurrency / (token_s + slow_s) if token_s else float("inf"),
            workload.concurrency / (token_s + fast_s) if token_s else float("inf"),
        ),
    )


def step_s(
    plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload, *, rows: float
) -> float:
    """Seconds of a decoding step of `rows` tokens of one request, with logits of each. Raises as
    `estimate`."""
    _check(plan, model, cluster)
    _view, terms = _decode_step(plan, model, cluster, workload, draft_phase(workload, rows))
    return sum(term.seconds for term in terms)


def _check(plan: Plan, model: ModelFacts, cluster: ClusterSpec) -> None:
    plan.validate(model, cluster, is_repaired=True)
    unmeasured = [device.name for device in map(cluster.device, plan.devices) if not device.rates]
    if unmeasured:
        raise PlanError(
            [f"Device {name!r} has not been measured, so no speed is known." for name in unmeasured]
        )


def _decode_step(
    plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload, phase: Phase
) -> "tuple[_View, tuple[Term, ...]]":
    """The terms of a decoding step, with the layers that such steps read from disk."""
    use = memory_use(plan, model, workload)
    decoding = while_decoding(plan, use, model, cluster, workload)
    view = _View(decoding, model, cluster)
    if phase.rows > workload.concurrency:  # a step reads the experts of all its rows
        workload = replace(workload, concurrency=round(phase.rows), expert_hits=None)
        use = memory_use(decoding, model, workload)
    elif decoding is not plan:
        use = memory_use(decoding, model, workload)
    waits = waits_for_disk(decoding, cluster, use, view.stage_seconds(phase))
    loads = view.loads(waits, loads_of(decoding, cluster, use))
    return view, merged([*view.steps(phase), *loads, *view.outside_stages(phase)])


class _View:
    """The terms of the steps of one plan on one cluster."""

    def __init__(self, plan: Plan, model: ModelFacts, cluster: ClusterSpec) -> None:
        self._plan = plan
        self._model = model
        self._devices = {device.id: device for device in cluster.devices}
        names = [device.name for device in cluster.devices]
        self._names = {
            device.id: device.name if names.count(device.name) == 1 else device.id
            for device in cluster.devices
        }
        self.network = Network(cluster)

    def steps(self, phase: Phase) -> Iterator[Term]:
        for number in range(len(self._plan.stages)):
            yield from self.stage(number, phase)

    def stage_seconds(self, phase: Phase) -> list[float]:
        return [
            sum(term.seconds for term in self.stage(number, phase))
            for number in range(len(self._plan.stages))
        ]

    def loads(
        self, waits: Sequence[tuple[str, float]], loads: Mapping[str, Load]
    ) -> Iterator[Term]:
        """For each stage the wait for the slowest of its disks, or links to a host."""
        seconds = dict(waits)
        for stage in self._plan.stages:
            slowest = max(stage.slices, key=lambda shard: seconds[shard.device])
            if seconds[slowest.device]:
                count = slowest.streamed_layers
                load = loads[slowest.device]
                kind: Kind = "copy" if load.copy_s > load.disk_s else "load"
                yield self._term(kind, [slowest], count, seconds[slowest.device])

    def stage(self, number: int, phase: Phase) -> list[Term]:
        """The terms of a stage in a step, from receiving the hidden state to sending it."""
        stage = self._plan.stages[number]
        is_first, is_last = number == 0, number == len(self._plan.stages) - 1
        paces = [self._pace(shard, stage, phase) for shard in stage.shards]
        slowest = max(range(len(paces)), key=lambda index: paces[index].step_s)
        terms = [self._term("step", [stage.shards[slowest]], 1, paces[slowest].step_s)]
        if len(paces) == 1:
            rows = len(stage.slices[0].vocab) if is_last else 0
            whole = paces[0].whole(self._model, self._model.count(stage.layers), rows)
            return terms + self._computed(stage, [whole], 1)
        return (
            terms
            + self._layers(stage, paces, phase)
            + self._sums(stage, 2 * len(stage.layers) + is_first, phase)
            + (self._computed(stage, [pace.bare() for pace in paces], 1) if is_first else [])
            + (
                self._head(stage, paces, phase)
                if is_last
                else self._computed(stage, [pace.bare() for pace in paces], 1)
            )
        )

    def hops_s(
        self, phase: Phase, hop_s: Callable[[Sequence[str], Sequence[str], float], float]
    ) -> list[float]:
        """Seconds of the hop from each stage to the next, by `hop_s` or `hop_busy_s` of the
        network."""
        model = self._model
        return [
            hop_s(
                _ids(before.shards),
                _ids(after.shards),
                phase.rows * model.hop_row_bytes(after.layers.start),
            )
            for before, after in pairwise(self._plan.stages)
        ]

    def outside_stages(self, phase: Phase) -> Iterator[Term]:
        """Hops between stages, choosing the token, and telling it to the first stage."""
        stages = self._plan.stages
        for (before, after), seconds in zip(
            pairwise(stages), self.hops_s(phase, self.network.hop_s), strict=True
        ):
            yield self._term("hop", [before.shards[0], after.shards[0]], 1, seconds)
        sampler = stages[-1].shards[0]
        rates = self._devices[sampler.device].rates
        assert rates is not None
        yield self._term("sample", [sampler], 1, phase.head_rows * rates.sample_s)
        listeners = [shard for shard in stages[0].shards if shard.device != sampler.device]
        if listeners:
            told = [
                self.network.message_s(sampler.device, each.device, phase.head_rows * TOKEN_BYTES)
                for each in listeners
            ]
            slowest = max(range(len(told)), key=lambda index: told[index])
            yield self._term("hop", [sampler, listeners[slowest]], 1, told[slowest])

    def shards_s(self, phase: Phase) -> list[list[tuple[str, float]]]:
        """(device, computing seconds) in a step, for each shard of each stage."""
        found: list[list[tuple[str, float]]] = []
        last = len(self._plan.stages) - 1
        for number, stage in enumerate(self._plan.stages):
            found.append([])
            paces = [self._pace(shard, stage, phase) for shard in stage.shards]
            sparse = [self._of_experts(stage, layer, paces) for layer in self._sparse_layers(stage)]
            for rank, (shard, pace) in enumerate(zip(stage.slices, paces, strict=True)):
                rows = len(shard.vocab) if number == last else 0
                if len(stage.shards) == 1:
                    layers = self._model.count(stage.layers)
                    own_s = pace.whole(self._model, layers, rows).mean_s
                else:
                    own_s = pace.bare().mean_s * ((number == 0) + (number != last))
                    own_s += pace.head(self._model, rows).mean_s
                    for part, facts, count in shard.counted(stage.layers, self._model):
                        layer_s = _attention(pace, part, facts).mean_s
                        if not _has_whole_experts(part, facts):
                            layer_s += pace.feed_forward(facts, len(part.ffn_columns)).mean_s
                        own_s += count * layer_s
                    own_s += sum(segments[rank].mean_s for segments in sparse)
                found[-1].append((shard.device, own_s))
        return found

    def spread_s(self, shards_s: Sequence[Sequence[tuple[str, float]]]) -> tuple[float, float]:
        """Seconds that a step takes more: when each stage is fast (0 or less), and when each is
        slow."""
        found = [0.0, 0.0]
        for side in range(2):
            for stage in shards_s:
                each_s = []
                for device, seconds in stage:
                    rates = self._devices[device].rates
                    assert rates is not None
                    each_s.append(seconds * (rates.spread[side] - 1))
                found[side] += max(each_s)  # the slowest decides
        return found[0], found[1]

    def _pace(self, shard: Share, stage: Stage, phase: Phase) -> Pace:
        device = self._devices[shard.device]
        others = [
            self._devices[each.device]
            for other in self._plan.stages
            if other is not stage
            for each in other.shards
        ]
        is_crowded = phase.overlaps and shares_host(others, device)
        return Pace.of(device, phase, in_stage=len(stage.shards), is_crowded=is_crowded)

    def _layers(self, stage: Stage, paces: Sequence[Pace], phase: Phase) -> list[Term]:
        """Two segments for each layer, each as long as its slowest shard."""
        terms: list[Term] = []
        for kind, (facts, count) in enumerate(self._model.count(stage.layers)):
            if count:
                parts = [shard.slice(kind) for shard in stage.slices]
                pairs = list(zip(paces, parts, strict=True))
                attention = [_attention(pace, part, facts) for pace, part in pairs]
                terms += self._computed(stage, attention, count)
                if any(_has_whole_experts(part, facts) for part in parts):
                    continue
                feed_forward = [
                    pace.feed_forward(facts, len(part.ffn_columns)) for pace, part in pairs
                ]
                terms += self._computed(stage, feed_forward, count)
        for layer in self._sparse_layers(stage):
            terms += self._routed(stage, layer, paces, phase)
        return terms

    def _sparse_layers(self, stage: Stage) -> list[int]:
        """Layers of the stage whose experts are whole."""
        if not any(shard.experts for shard in stage.slices):
            return []
        kinds, layers = self._model.kinds, self._model.layers
        return [layer for layer in stage.layers if kinds[layers[layer]].num_experts]

    def _of_experts(self, stage: Stage, layer: int, paces: Sequence[Pace]) -> list[Segment]:
        """The segment of each shard for the experts of one such layer, on average."""
        kind = self._model.layers[layer]
        facts, held = self._model.kinds[kind], chances_held(stage, self._model, layer)
        return [
            pace.with_whole_experts(facts, len(columns), load(own, facts))
            if (columns := shard.slice(kind).ffn_columns)
            else pace.feed_forward(facts, 0)
            for pace, shard, own in zip(paces, stage.slices, held, strict=True)
        ]

    def _routed(
        self, stage: Stage, layer: int, paces: Sequence[Pace], phase: Phase
    ) -> Iterator[Term]:
        """The slowest shard's average time for the experts of a layer, and the further wait because
        each token uses other experts. In steps of many tokens the loads are more even, so the wait
        shrinks."""
        segments = self._of_experts(stage, layer, paces)
        yield from self._computed(stage, segments, 1)
        if phase.rows > _MANY_ROWS:
            return
        kind = self._model.layers[layer]
        facts, held = self._model.kinds[kind], chances_held(stage, self._model, layer)
        expert_s = tuple(
            pace.weight_s * pace.slack * facts.num_experts * facts.expert_bytes / facts.top_k
            for pace in paces
        )
        others_s = tuple(
            segment.total_s - each_s * sum(own)
            for segment, each_s, own in zip(segments, expert_s, held, strict=True)
        )
        until_s = expected_slowest(others_s, expert_s, held, facts.top_k)
        more_s = max(0.0, until_s - max(segment.total_s for segment in segments))
        if more_s:
            yield self._term("wait", stage.shards, 1, more_s / math.sqrt(max(1.0, phase.rows)))

    def _sums(self, stage: Stage, count: int, phase: Phase) -> list[Term]:
        devices = [self._devices[shard.device] for shard in stage.shards]
        sum_s = stage_sum_s(self.network, self._model, devices, phase)
        return [self._term("reduce", stage.shards, count, count * sum_s)]

    def _head(self, stage: Stage, paces: Sequence[Pace], phase: Phase) -> list[Term]:
        """The logits of each shard, and the way of its best tokens to rank 0.

        These are a few bytes, and all shards send them at the same time.
        """
        pairs = zip(paces, stage.slices, strict=True)
        segments = [pace.head(self._model, len(shard.vocab)) for pace, shard in pairs]
        latency_s = gather_latency_s(self.network, _ids(stage.shards))
        way = self._term("sample", stage.shards, 1, latency_s)
        return [*self._computed(stage, segments, 1), way]

    def _computed(self, stage: Stage, segments: Sequence[Segment], count: int) -> list[Term]:
        """`count` times the slowest of these segments, one for each shard of the stage.

        Shards on one device compute one after the other.
        """
        on_device = Counter(shard.device for shard in stage.shards)
        sharing = [on_device[shard.device] for shard in stage.shards]
        slowest = max(
            range(len(segments)), key=lambda index: sharing[index] * segments[index].total_s
        )
        own, segment = [stage.shards[slowest]], segments[slowest]
        count *= sharing[slowest]
        wait_s = segment.total_s - segment.mean_s
        terms = [
            self._term("compute", own, count, count * segment.weights_s),
            self._term("attention", own, count, count * segment.attention_s),
            self._term("runs", own, count, count * segment.runs_s),
            self._term("wait", stage.shards, count, count * wait_s),
        ]
        return [term for term in terms if term.seconds]

    def _term(self, kind: Kind, shards: Sequence[Share], count: int, seconds: float) -> Term:
        where = "-".join(self._names[shard.device] for shard in shards)
        return Term(kind=kind, where=where, count=count, seconds=seconds)


def _has_whole_experts(part: LayerSlice, facts: LayerFacts) -> bool:
    return bool(part.whole_experts and facts.num_experts)


def _attention(pace: Pace, part: LayerSlice, layer: LayerFacts) -> Segment:
    return pace.attention(layer, len(part.heads), num_local_kv_heads(part.heads, layer))


def passing_stages_s(hops_s: Sequence[float]) -> list[float]:
    """Seconds that each stage spends to receive a chunk and to send it on.

    The thread of a stage does both, so it begins the next chunk only after them.
    """
    return [before + after for before, after in zip((0.0, *hops_s), (*hops_s, 0.0), strict=True)]


def gather_latency_s(network: Network, ids: Sequence[str]) -> float:
    """Seconds until rank 0 has the best tokens of every shard's part of the vocabulary."""
    return max((network.link(id, ids[0])[0] for id in ids[1:]), default=0.0)


def _ids(shards: Sequence[Share]) -> tuple[str, ...]:
    return tuple(shard.device for shard in shards)
