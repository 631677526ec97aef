"""The bytes that a plan needs on each device. Counts by the facts; allocates nothing."""

from edge.partition.plan.facts import ModelFacts, Workload
from edge.partition.plan.plan import Plan
from edge.partition.plan.share import MemoryUse


def memory_use(plan: Plan, model: ModelFacts, workload: Workload) -> dict[str, MemoryUse]:
    """Bytes by device id, in the order of `plan.devices`. PlanError when it is not for `model`."""
    plan.validate(model, None, is_repaired=True)
    use: dict[str, MemoryUse] = {}
    for number, stage in enumerate(plan.stages):
        for share in stage.shards:
            own = share.memory(plan.place(number), model, workload)
            held = use.get(share.device)
            use[share.device] = own if held is None else held + own
    return use


def units_that_fit(room_bytes: int, unit_bytes: int, most: int) -> int:
    """How many units fit into the room, at most `most`; -1 when the room itself is negative."""
    if room_bytes < 0:
        return -1
    return min(most, room_bytes // unit_bytes) if unit_bytes else most
