"""A plan as rows for a table. Data only; callers format it."""

from dataclasses import dataclass

from edge.partition.fit.memory import memory_use
from edge.partition.fit.streamed_layers import brought_in, tiers_of
from edge.partition.plan.facts import ClusterSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan
from edge.partition.plan.ranges import kv_heads
from edge.partition.plan.shard import Shard
from edge.partition.plan.share import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayers:
    """A shard's slice of the layers of one kind."""

    num_layers: int
    heads: range
    kv_heads: tuple[int, ...]
    """KV heads of the model that the shard holds; some more than once (see `kv_heads`)."""
    kv_copies: int
    """How many of these are copies: held by this shard already, or by one before it in the
    stage."""
    ffn_columns: range
    whole_experts: int
    """Whole experts in each layer; 0 where experts are cut by columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One share of a plan, and the memory that it takes from its device."""

    device: str
    """The id of the device."""
    name: str
    """The display name of the device."""
    stage: int
    """Counts from 0."""
    layers: range
    in_words: str
    """The share's part of these layers."""
    held: tuple[HeldLayers, ...]
    """For each kind of layer in the stage; empty where the share is no slice of layers."""
    vocab: range
    streamed_layers: int
    """How many of `layers`, counted from the last, are brought into the device's memory for each
    step, except for those that the window holds."""
    host_layers: int
    """How many of the streamed layers stay in the memory of the device's host; the others are read
    from disk."""
    memory: MemoryUse
    left_bytes: int
    """Memory of the device that stays free; negative when it is too small."""


def describe(
    plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> list[PlanRow]:
    """One row for each share, in plan order. PlanError when the plan is not for these."""
    plan.validate(model, cluster, is_repaired=True)
    use = memory_use(plan, model, workload)
    rows: list[PlanRow] = []
    for number, stage in enumerate(plan.stages):
        known: dict[int, set[int]] = {}
        for share in stage.shards:
            device = cluster.device(share.device)
            memory = use[device.id]
            shard = share if isinstance(share, Shard) else None
            if shard is not None:
                memory = brought_in(shard, memory, device)
            rows.append(
                PlanRow(
                    device=device.id,
                    name=device.name,
                    stage=number,
                    layers=stage.layers,
                    in_words=share.in_words(),
                    held=() if shard is None else _held(shard, stage.layers, model, known),
                    vocab=range(0) if shard is None else shard.vocab,
                    streamed_layers=0 if shard is None else shard.streamed_layers,
                    host_layers=0
                    if shard is None
                    else tiers_of(shard, len(stage.layers), memory, device).pinned,
                    memory=memory,
                    left_bytes=device.memory_bytes - memory.total,
                )
            )
    return rows


def _held(
    shard: Shard, layers: range, model: ModelFacts, known: dict[int, set[int]]
) -> tuple[HeldLayers, ...]:
    """known: for each kind, the KV heads of the shards before this one. Those of this shard are
    added."""
    held: list[HeldLayers] = []
    for kind, (facts, count) in enumerate(model.count(layers)):
        if not count:
            continue
        part, before = shard.slice(kind), known.setdefault(kind, set())
        local = kv_heads(part.heads, facts.num_heads, facts.num_kv_heads)
        held.append(
            HeldLayers(
                num_layers=count,
                heads=part.heads,
                kv_heads=local,
                kv_copies=len(local) - len(set(local) - before),
                ffn_columns=part.ffn_columns,
                whole_experts=part.whole_experts if facts.num_experts else 0,
            )
        )
        before |= set(local)
    return tuple(held)
