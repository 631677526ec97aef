"""Pipelines by threads and memory: which devices to use, and how many layers each gets.

Pure search over layer counts. Devices keep the order of the cluster, so the first device in use
also holds the embedding, and the last the head.
"""

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from edge.partition.errors import PlanError, Shortage
from edge.partition.plan.facts import ClusterSpec, DeviceSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.shard import whole_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Bytes of the parts of a pipeline."""

    reach_bytes: tuple[int, ...]
    """Weights and KV cache of the first n whole layers."""
    embedding_bytes: int
    head_bytes: int

    @classmethod
    def of(cls, model: ModelFacts, workload: Workload) -> "_Costs":
        of_kind = [
            kind.weight_bytes + kind.num_kv_heads * kind.kept_bytes(workload)
            for kind in model.kinds
        ]
        return cls(
            reach_bytes=tuple(
                itertools.accumulate((of_kind[kind] for kind in model.layers), initial=0)
            ),
            embedding_bytes=model.vocab_size * model.embedding_row_bytes,
            head_bytes=model.vocab_size * model.head_row_bytes,
        )

    @property
    def num_layers(self) -> int:
        return len(self.reach_bytes) - 1

    def run_bytes(self, count: int) -> int:
        """The most bytes of any `count` layers in a row. Where a stage will begin is not known
        here."""
        return _largest_run(self.reach_bytes, count)

    def ends(self, count: int) -> list[int]:
        """Bytes of embedding and head for each of `count` stages."""
        ends = [0] * count
        ends[0] += self.embedding_bytes
        ends[-1] += self.head_bytes
        return ends

    def capacity(self, device: DeviceSpec, ends_bytes: int) -> int:
        """Layers the device has room for; -1 when `ends_bytes` alone are too much."""
        room_bytes = device.memory_bytes - ends_bytes
        if room_bytes < 0:
            return -1
        counts = range(self.num_layers + 1)
        return bisect.bisect_right(counts, room_bytes, key=self.run_bytes) - 1

    def capacities(self, chain: Sequence[DeviceSpec]) -> list[int]:
        ends = self.ends(len(chain))
        return [self.capacity(device, end) for device, end in zip(chain, ends, strict=True)]


def place_pipeline(model: ModelFacts, cluster: ClusterSpec, workload: Workload) -> Plan | None:
    """A stage on every device, or None when memory is short. PlanError: too many devices.

    Of all plans that fit, the one whose slowest stage (layers per thread) is fastest.
    """
    check_pipeline_count(model, cluster)
    chain = cluster.devices
    costs = _Costs.of(model, workload)
    capacities = costs.capacities(chain)
    if min(capacities) < 1 or sum(capacities) < model.num_layers:
        return None
    return _plan(model, chain, allot_layers(model.num_layers, chain, capacities))


def check_pipeline_count(model: ModelFacts, cluster: ClusterSpec) -> None:
    """PlanError when there are more devices than layers."""
    count = len(cluster.devices)
    if count > model.num_layers:
        raise PlanError(
            [
                f"{count} devices cannot each hold a layer of model {model.name!r}, which has"
                f" {model.num_layers}. Use at most {model.num_layers} devices, or split the layers"
                " themselves with parallel='tensor'."
            ]
        )


def pipeline_shortages(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> tuple[Shortage, ...]:
    """What the devices lack when `place_pipeline` finds nothing."""
    return _shortages(_Costs.of(model, workload), cluster.devices)


def place_fewest(model: ModelFacts, cluster: ClusterSpec, workload: Workload) -> Plan | None:
    """The plan with the fewest devices, or None when all devices together lack memory.

    If single devices can hold everything: the one with the most threads, then the most memory, then
    the smallest id. Otherwise the shortest pipeline; of equally short ones, that with the most
    memory in all.
    """
    costs = _Costs.of(model, workload)
    everything = [
        device
        for device in cluster.devices
        if costs.capacity(device, costs.embedding_bytes + costs.head_bytes) == costs.num_layers
    ]
    if everything:
        best = min(everything, key=lambda one: (-one.threads, -one.memory_bytes, one.id))
        return _plan(model, [best], [costs.num_layers])
    chains = [
        chain[:needed]
        for chain in _chains(costs, cluster.devices)
        if (needed := _needed(costs, chain)) is not None
    ]
    if not chains:
        return None
    order = {device.id: index for index, device in enumerate(cluster.devices)}
    shortest = min(
        chains, key=lambda chain: (len(chain), -sum(device.memory_bytes for device in chain))
    )
    used = sorted(shortest, key=lambda device: order[device.id])
    return _plan(model, used, allot_layers(costs.num_layers, used, costs.capacities(used)))


def fewest_shortages(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> tuple[Shortage, ...]:
    """What the devices lack when `place_fewest` finds nothing.

    The choice of devices that lacks the fewest bytes, if all layers that do not fit go to one of
    them.
    """
    costs = _Costs.of(model, workload)
    order = {device.id: index for index, device in enumerate(cluster.devices)}
    choices = [_shortages(costs, [device]) for device in cluster.devices]
    for chain in _chains(costs, cluster.devices):
        choices.append(_shortages(costs, sorted(chain, key=lambda device: order[device.id])))
    return min(
        choices,
        key=lambda choice: (sum(shortage.missing_bytes for shortage in choice), len(choice)),
    )


def allot_layers(
    num_layers: int, chain: Sequence[DeviceSpec], capacities: Sequence[int]
) -> list[int]:
    """Layers for each device, 1 to its capacity, such that max(layers / threads) is least.

    Each device gets one layer. Every further layer goes to the device that is fastest with it. For
    separable convex costs this greedy choice is optimal (O. Gross, 1956; Ibaraki and Katoh,
    Resource Allocation Problems, 1988, chapter 4). Of equals, the device with most threads takes
    the layer. The others gain most by not having it, so the stages after the slowest are as fast as
    they can be, too.

    The capacities must be at least 1 and add up to `num_layers` or more.
    """
    counts = [1] * len(chain)

    def bid(index: int) -> tuple[Fraction, int, int]:
        threads = chain[index].threads
        return (Fraction(counts[index] + 1, threads), -threads, index)

    bids = [bid(index) for index in range(len(chain)) if capacities[index] > 1]
    heapq.heapify(bids)
    for _ in range(num_layers - len(chain)):
        index = heapq.heappop(bids)[-1]
        counts[index] += 1
        if counts[index] < capacities[index]:
            heapq.heappush(bids, bid(index))
    return counts


def _chains(costs: _Costs, devices: Sequence[DeviceSpec]) -> Iterator[list[DeviceSpec]]:
    """For every choice of first and last device: both, then the devices between them by falling
    memory.

    Middle stages are alike, so the best n devices for them are the n with the most memory. Trying
    the beginnings of these chains therefore tries every useful set of devices. Devices without room
    for a layer are left out of the middle.
    """
    if costs.num_layers < 2:
        return
    for last in range(1, len(devices)):
        for first in range(last):
            between = [
                device for device in devices[first + 1 : last] if costs.capacity(device, 0) > 0
            ]
            between.sort(key=lambda device: -device.memory_bytes)
            yield [devices[first], devices[last], *between]


def _needed(costs: _Costs, chain: Sequence[DeviceSpec]) -> int | None:
    """How many devices from the beginning of a chain of `_chains` hold all layers; None: the whole
    chain does not.

    Never more devices than layers, because each of them has room for one.
    """
    first = costs.capacity(chain[0], costs.embedding_bytes)
    last = costs.capacity(chain[1], costs.head_bytes)
    if min(first, last) < 1:
        return None
    held = first + last
    needed = 2
    for device in chain[2:]:
        if held >= costs.num_layers:
            break
        held += costs.capacity(device, 0)
        needed += 1
    return needed if held >= costs.num_layers else None


def _shortages(costs: _Costs, chain: Sequence[DeviceSpec]) -> tuple[Shortage, ...]:
    """Memory to add for a pipeline over exactly these devices: room for one layer on each, and for
    layers that fit nowhere on the device where they need the fewest bytes."""
    ends = costs.ends(len(chain))
    layers = [max(1, capacity) for capacity in costs.capacities(chain)]
    unplaced = max(0, costs.num_layers - sum(layers))

    def missing(index: int, count: int) -> int:
        needed = ends[index] + costs.run_bytes(count)
        return max(0, needed - chain[index].memory_bytes)

    overflow = min(
        range(len(chain)),
        key=lambda index: missing(index, layers[index] + unplaced) - missing(index, layers[index]),
    )
    layers[overflow] += unplaced
    return tuple(
        Shortage(device=device.id, name=device.name, missing_bytes=missing(index, layers[index]))
        for index, device in enumerate(chain)
        if missing(index, layers[index])
    )


@lru_cache(maxsize=4096)
def _largest_run(reach_bytes: tuple[int, ...], count: int) -> int:
    return max(stop - start for start, stop in zip(reach_bytes, reach_bytes[count:], strict=False))


def _plan(model: ModelFacts, chain: Sequence[DeviceSpec], counts: Sequence[int]) -> Plan:
    stages: list[Stage] = []
    start = 0
    for index, (device, count) in enumerate(zip(chain, counts, strict=True)):
        outer = index in (0, len(chain) - 1)
        shard = whole_shard(device.id, model, vocab=range(model.vocab_size if outer else 0))
        stages.append(Stage(layers=range(start, start + count), shards=(shard,)))
        start += count
    return Plan(model=model.name, version=1, stages=tuple(stages))
