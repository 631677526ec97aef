"""From facts to a plan: the choice between ways to divide the work, and the check that it fits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from partition.errors import CapacityError, PlanError, Shortage
from partition.facts import ClusterSpec, ModelFacts, Workload
from partition.memory import memory_use
from partition.pipeline import fewest_shortages, pipeline_shortages, place_fewest, place_pipeline
from partition.plan import Plan
from partition.tensor import place_tensor, tensor_shortages

Parallel = Literal["auto", "pipeline", "tensor"]

_Place = Callable[[ModelFacts, ClusterSpec, Workload], Plan | None]
_Explain = Callable[[ModelFacts, ClusterSpec, Workload], tuple[Shortage, ...]]

_METHODS: dict[Parallel, tuple[_Place, _Explain]] = {
    "auto": (place_fewest, fewest_shortages),
    "pipeline": (place_pipeline, pipeline_shortages),
    "tensor": (place_tensor, tensor_shortages),
}


def solve(
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    parallel: Parallel = "auto",
) -> Plan:
    """A valid plan, version 1, that fits the memory of every device it uses.

    auto      One device if one can hold everything (the one with the most threads), else a
              pipeline over as few devices as possible, those with the most memory first.
    pipeline  A stage on every device, in the order of the cluster; layers by threads and memory.
    tensor    One stage with a shard on every device; slices by threads and memory.

    The same facts always give the same plan. Raises CapacityError when memory is short, PlanError
    when the devices are too many for this model (or none), ValueError for an unknown `parallel`.
    """
    if parallel not in _METHODS:
        allowed = ", ".join(map(repr, get_args(Parallel)))
        raise ValueError(f"parallel must be one of {allowed}, not {parallel!r}.")
    if not cluster.devices:
        raise PlanError(["The cluster has no devices; start a peer on at least one."])
    place, explain = _METHODS[parallel]
    plan = place(model, cluster, workload)
    if plan is None:
        raise CapacityError(
            explain(model, cluster, workload),
            context_tokens=workload.context_tokens,
            largest_context_tokens=_largest_context(place, model, cluster, workload),
        )
    return plan


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
            # kv_bytes are proportional to the context, so this division is exact.
            token_bytes = use.kv_bytes // workload.context_tokens
            room_bytes = device.memory_bytes - use.weight_bytes
            longest = min(longest, room_bytes // token_bytes if token_bytes else 0)
    if shortages:
        raise CapacityError(
            shortages,
            context_tokens=workload.context_tokens,
            largest_context_tokens=longest if longest >= 1 else None,
        )


def _largest_context(
    place: _Place, model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> int | None:
    """The longest context for which `place` finds a plan, by bisection; None when there is none."""
    fits, too_long = 0, workload.context_tokens
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        shorter = replace(workload, prompt_tokens=middle, output_tokens=0)
        if place(model, cluster, shorter) is None:
            too_long = middle
        else:
            fits = middle
    return fits or None
