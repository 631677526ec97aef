"""A plan as rows for a table. Pure data: how it looks is for whoever shows it."""

from dataclasses import dataclass

from partition.fit.memory import MemoryUse, memory_use
from partition.fit.streaming import tiers_of
from partition.plan.facts import ClusterSpec, ModelFacts, Workload
from partition.plan.plan import Plan
from partition.plan.ranges import kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One shard of a plan, with what it costs its device."""

    device: str
    """The id of the device."""
    name: str
    """What people call it."""
    stage: int
    """Counts from 0."""
    layers: range
    heads: range
    kv_heads: tuple[int, ...]
    """Which KV heads of the model the shard holds; some more than once (see `kv_heads`)."""
    kv_copies: int
    """Of these, so many are copies of what this shard or one before it in the stage holds."""
    ffn_columns: range
    vocab: range
    streamed_layers: int
    """Of `layers`, the last ones come into the device's memory for each step, as far as a window
    does not hold them."""
    host_layers: int
    """Of these, so many stay in the memory of the device's host; the others come from disk."""
    memory: MemoryUse
    left_bytes: int
    """Memory of the device that stays free; negative when it is too small."""


def describe(
    plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> list[PlanRow]:
    """One row for each shard, in plan order. PlanError when the plan is not for these."""
    plan.validate(model, cluster)
    use = memory_use(plan, model, workload)
    rows: list[PlanRow] = []
    for number, stage in enumerate(plan.stages):
        held: set[int] = set()
        for shard in stage.shards:
            local = kv_heads(shard.heads, model.num_heads, model.num_kv_heads)
            kv_copies = len(local) - len(set(local) - held)
            held |= set(local)
            device = cluster.device(shard.device)
            memory = use[device.id]
            rows.append(
                PlanRow(
                    device=device.id,
                    name=device.name,
                    stage=number,
                    layers=stage.layers,
                    heads=shard.heads,
                    kv_heads=local,
                    kv_copies=kv_copies,
                    ffn_columns=shard.ffn_columns,
                    vocab=shard.vocab,
                    streamed_layers=shard.streamed_layers,
                    host_layers=tiers_of(
                        shard, len(stage.layers), memory.streamed_bytes, device
                    ).pinned,
                    memory=memory,
                    left_bytes=device.memory_bytes - memory.total,
                )
            )
    return rows
