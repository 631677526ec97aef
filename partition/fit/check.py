"""The check that a plan fits into the memory of its devices."""

from contextlib import suppress

from edge.partition.errors import CapacityError, PlanError, Shortage
from edge.partition.fit.memory import memory_use
from edge.partition.plan.facts import ClusterSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan


def check_fit(
    plan: Plan,
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    is_repaired: bool = False,
) -> None:
    """Raise CapacityError, with every device that lacks memory, unless the plan fits.

    PlanError when the plan is not for this model and cluster; it also says what devices lack.
    """
    try:
        plan.validate(model, cluster, is_repaired=is_repaired)
    except PlanError as error:
        lacks: list[Shortage] = []
        with suppress(PlanError):  # the plan may be for another model
            lacks, _ = _shortages(plan, model, cluster, workload)
        raise PlanError([*error.problems, *(f"{each.words}." for each in lacks)]) from error
    shortages, longest = _shortages(plan, model, cluster, workload)
    if shortages:
        raise CapacityError(
            shortages,
            context_tokens=workload.context_tokens,
            largest_context_tokens=longest if longest >= 1 else None,
        )


def _shortages(
    plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> tuple[list[Shortage], int]:
    """The bytes that devices lack, and the longest context that would fit."""
    shortages: list[Shortage] = []
    longest = workload.context_tokens
    devices = {device.id: device for device in cluster.devices}
    for id, use_anywhere in memory_use(plan, model, workload).items():
        device = devices.get(id)
        if device is not None and (use := use_anywhere.on(device)).total > device.memory_bytes:
            shortages.append(
                Shortage(device=id, name=device.name, missing_bytes=use.total - device.memory_bytes)
            )
            room_bytes = device.memory_bytes - use.weight_bytes - use.state_bytes
            # kv_bytes grow in proportion to the context.
            fitting = room_bytes * workload.context_tokens // use.kv_bytes if use.kv_bytes else 0
            longest = min(longest, fitting)
    return shortages, longest
