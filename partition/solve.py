"""The plan of a choice, and the check that a plan fits."""

from partition.choose import choose
from partition.errors import CapacityError, Shortage
from partition.facts import ClusterSpec, ModelFacts, Workload
from partition.memory import memory_use
from partition.placement import Parallel
from partition.plan import Plan


def solve(
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    parallel: Parallel = "auto",
) -> Plan:
    """The plan that `choose` chooses, without what is predicted of it; raises what that raises."""
    return choose(model, cluster, workload, parallel=parallel).plan


def check_fit(plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload) -> None:
    """Raise CapacityError, naming every device that is short, unless all memory suffices.

    PlanError when the plan is not for this model and cluster.
    """
    plan.validate(model, cluster)
    shortages: list[Shortage] = []
    longest = workload.context_tokens
    for id, use in memory_use(plan, model, workload).items():
        device = cluster.device(id)
        if use.total > device.memory_bytes:
            shortages.append(
                Shortage(device=id, name=device.name, missing_bytes=use.total - device.memory_bytes)
            )
            room_bytes = device.memory_bytes - use.weight_bytes
            # kv_bytes are proportional to the context.
            fitting = room_bytes * workload.context_tokens // use.kv_bytes if use.kv_bytes else 0
            longest = min(longest, fitting)
    if shortages:
        raise CapacityError(
            shortages,
            context_tokens=workload.context_tokens,
            largest_context_tokens=longest if longest >= 1 else None,
        )
