"""Weight offload in plans: which layers are on disk, and how long reading them takes.

Every step uses the layers in the same order. So the best policy is to keep as many as fit and to
read the others in each step (see `offload`'s streamer). Plans that stream are compared with all
others by time, but they are not searched exactly. The candidates are each device alone, a pipeline,
and slices, with shares in proportion to memory.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from edge.partition.errors import PartitionError, PlanError
from edge.partition.fit.placement import Parallel, check_count, place
from edge.partition.fit.weight_tiers import WeightTiers, weight_tiers
from edge.partition.plan.expert_tiers import WINDOW_LAYERS
from edge.partition.plan.facts import ClusterSpec, DeviceSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan
from edge.partition.plan.shard import Shard
from edge.partition.plan.share import MemoryUse

UNMEASURED_DISK_BYTES_PER_S = 500e6
"""Read rate of a slow solid-state disk."""

UNMEASURED_COPY_BYTES_PER_S = 6e9
"""Half the rate of PCIe 3 with sixteen lanes."""

_SCALES = 40
"""Steps of the bisection over memory; each halves the uncertainty."""

_MOST_SCALE = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds that a device takes in each step to bring in its streamed layers."""

    disk_s: float
    """To read the layers that are on disk."""
    copy_s: float
    """To copy all streamed layers from host memory; 0 where the device computes in host memory."""
    routed_s: float = 0.0
    """The part of `disk_s` for experts. They are read after the router ran."""
    runs_s: float = 0.0
    """Further seconds because each expert is a graph of its own."""

    @property
    def seconds(self) -> float:
        """Reading and copying run at the same time."""
        return max(self.disk_s, self.copy_s)


_NO_LOAD = Load(disk_s=0.0, copy_s=0.0)


def brought_in(shard: Shard, use: MemoryUse, device: DeviceSpec) -> MemoryUse:
    """`use` on this device: a device with memory of its own gets layers whole, whichever of their
    experts are needed."""
    use = use.on(device)
    if device.host_memory_bytes is None or not use.routed_bytes:
        return use
    layers = shard.streamed_layers if shard.streamed_layers > WINDOW_LAYERS else 0
    return replace(use, streamed_bytes=layers * use.streamed_layer_bytes, routed_bytes=0)


def loads_of(plan: Plan, cluster: ClusterSpec, use: Mapping[str, MemoryUse]) -> dict[str, Load]:
    """For each device that streams, its load; devices of one host share a disk."""
    disk_bytes: dict[str, int] = {}
    uses: dict[str, MemoryUse] = {}
    for stage in plan.stages:
        for shard in stage.slices:
            device = cluster.device(shard.device)
            each = uses[device.id] = brought_in(shard, use[device.id], device)
            if each.streamed_bytes or each.expert_runs:
                tiers = tiers_of(shard, len(stage.layers), each, device)
                nbytes = each.streamed_bytes
                if tiers.streamed:  # otherwise only experts are read
                    nbytes = nbytes * tiers.on_disk // tiers.streamed
                disk_bytes[device.id] = nbytes
    reading = [cluster.device(id) for id in plan.devices if disk_bytes.get(id)]

    def load(device: DeviceSpec, nbytes: int) -> Load:
        byte_s = _sharing(reading, device) / _disk_rate(device)
        return Load(
            disk_s=nbytes * byte_s,
            copy_s=uses[device.id].streamed_bytes / _copy_rate(device),
            routed_s=uses[device.id].routed_bytes * byte_s,
            runs_s=uses[device.id].expert_runs * _expert_s(device),
        )

    return {id: load(cluster.device(id), nbytes) for id, nbytes in disk_bytes.items()}


def tiers_of(shard: Shard, num_layers: int, use: MemoryUse, device: DeviceSpec) -> WeightTiers:
    """Where the layers of a shard lie on this device; `use` as `memory_use` says."""
    return weight_tiers(
        num_layers,
        streamed=shard.streamed_layers if use.streamed_bytes else 0,
        window=WINDOW_LAYERS,
        layer_bytes=use.streamed_layer_bytes,
        host_bytes=device.host_memory_bytes or 0,
    )


def waits_for_disk(
    plan: Plan, cluster: ClusterSpec, use: Mapping[str, MemoryUse], stages_s: list[float]
) -> list[tuple[str, float]]:
    """(device, seconds) of each shard of a plan: how long it waits for its disk in a step.

    A disk reads while its own stage computes, and before that until its window is full. The stage
    waits for the whole time of reading experts, and of running one graph for each expert that is
    used.
    """
    loads = loads_of(plan, cluster, use)
    waits: list[tuple[str, float]] = []
    for stage, own_s in zip(plan.stages, stages_s, strict=True):
        others_s = sum(stages_s) - own_s
        for shard in stage.slices:
            load = loads.get(shard.device, _NO_LOAD)
            disk_s = load.seconds - load.routed_s
            ahead_s = disk_s * min(1.0, WINDOW_LAYERS / max(1, shard.streamed_layers))
            wait_s = disk_s - own_s - min(others_s, ahead_s)
            waits.append((shard.device, max(0.0, wait_s) + load.routed_s + load.runs_s))
    return waits


def while_decoding(
    plan: Plan,
    use: Mapping[str, MemoryUse],
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
) -> Plan:
    """The plan with the layers that decoding steps read from disk.

    While contexts and steps are small, the memory that is kept for larger ones holds further layers
    or experts. Only for devices that compute in host memory.
    """
    used_tokens = workload.concurrency * workload.context_tokens
    unused_part = max(0.0, 1 - used_tokens / workload.cached_tokens)
    for number, stage in enumerate(plan.stages):
        for rank, shard in enumerate(stage.slices):
            own, device = use[shard.device], cluster.device(shard.device)
            if own.streamed_bytes and device.host_memory_bytes is None:
                buffer_bytes = device.unused_buffer_bytes // len(stage.shards)
                unused_bytes = int(own.kv_bytes * unused_part) + buffer_bytes
                if own.expert_bytes:
                    kept = shard.kept_experts + unused_bytes // own.expert_bytes
                    changed = shard.keeping(min(kept, shard.experts_in(stage.layers, model)))
                else:
                    lent = min(shard.streamed_layers, unused_bytes // own.streamed_layer_bytes)
                    changed = shard.streaming(shard.streamed_layers - lent)
                plan = _with_share(plan, number, rank, changed)
    return plan


def streaming(plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload) -> Plan:
    """The plan with as few streamed layers as its devices' memory allows. Memory that is too little
    for one more layer holds experts.

    Raises PartitionError for the first device that cannot hold even the rest.
    """
    for number, stage in enumerate(plan.stages):
        for rank, shard in enumerate(stage.slices):
            device = cluster.device(shard.device)
            for count in range(len(stage.layers) + 1 if device.streams else 1):
                changed = shard.streaming(count).keeping(0)
                use = changed.memory(plan.place(number), model, workload).on(device)
                need = use.total
                if need <= device.memory_bytes:
                    if use.expert_bytes:
                        spare = (device.memory_bytes - need) // use.expert_bytes
                        changed = changed.keeping(min(spare, shard.experts_in(stage.layers, model)))
                    plan = _with_share(plan, number, rank, changed)
                    break
            else:
                more = f"{device.name} needs {need - device.memory_bytes:,} bytes more"
                if not device.streams:
                    raise PartitionError(f"{more}: it computes only from its memory.")
                raise PartitionError(
                    f"{more} even if every layer is read from disk: for its part of the vocabulary,"
                    f" the KV cache and a window of {WINDOW_LAYERS} layers."
                )
    return plan


def streaming_plans(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload, parallel: Parallel
) -> Iterator[Plan]:
    """Candidate plans that fit with streamed layers."""
    clusters = [cluster]
    if parallel == "auto":
        clusters = [*(ClusterSpec(devices=(each,)) for each in cluster.devices), cluster]
    for part in clusters:
        methods: tuple[Parallel, ...] = (
            ("pipeline", "tensor") if parallel == "auto" else (parallel,)
        )
        if len(part.devices) == 1:
            methods = methods[:1]
        for method in methods:
            try:
                check_count(model, part, method)
            except PlanError:
                continue  # too many devices for this method
            plan = _in_proportion(model, part, workload, method)
            if plan is not None:
                try:
                    yield streaming(plan, model, cluster, workload)
                except PartitionError:
                    continue


def _in_proportion(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload, method: Parallel
) -> Plan | None:
    """The plan for devices whose memory is all scaled by the least factor that is enough."""

    def at(scale: float) -> Plan | None:
        larger = tuple(
            replace(device, memory_bytes=int(device.memory_bytes * scale))
            if device.streams
            else device
            for device in cluster.devices
        )
        return place(model, replace(cluster, devices=larger), workload, method)

    low, high = 1.0, _MOST_SCALE
    best = at(high)
    if best is None:
        return None
    for _ in range(_SCALES):
        middle = (low * high) ** 0.5
        plan = at(middle)
        if plan is None:
            low = middle
        else:
            best, high = plan, middle
    return best


def _with_share(plan: Plan, number: int, rank: int, share: Shard) -> Plan:
    stage = plan.stages[number]
    shards = list(stage.slices)
    shards[rank] = share
    stages = list(plan.stages)
    stages[number] = replace(stage, shards=tuple(shards))
    return replace(plan, stages=tuple(stages))


def _sharing(reading: list[DeviceSpec], device: DeviceSpec) -> int:
    if not device.host:
        return 1
    return sum(other.host == device.host for other in reading)


def _expert_s(device: DeviceSpec) -> float:
    rates = device.rates
    if rates is None:
        return 0.0
    return rates.run_s if rates.expert_s is None else rates.expert_s


def _copy_rate(device: DeviceSpec) -> float:
    if device.host_memory_bytes is None:
        return math.inf
    rates = device.rates
    if rates is None or rates.copy_bytes_per_s is None:
        return UNMEASURED_COPY_BYTES_PER_S
    return rates.copy_bytes_per_s


def _disk_rate(device: DeviceSpec) -> float:
    rates = device.rates
    if rates is None or rates.disk_bytes_per_s is None:
        return UNMEASURED_DISK_BYTES_PER_S
    return rates.disk_bytes_per_s
