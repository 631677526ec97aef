"""Plans by threads and memory for unmeasured devices, and the memory that devices lack."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from edge.partition.errors import CapacityError, Shortage
from edge.partition.fit.pipeline import (
    check_pipeline_count,
    fewest_shortages,
    pipeline_shortages,
    place_fewest,
    place_pipeline,
)
from edge.partition.fit.tensor import check_tensor_count, place_tensor, tensor_shortages
from edge.partition.plan.facts import ClusterSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan

Parallel = Literal["auto", "pipeline", "tensor"]
"""How a model is divided. pipeline: whole layers each; tensor: slices of every layer; auto: the
fastest by measured rates."""

_Place = Callable[[ModelFacts, ClusterSpec, Workload], Plan | None]
_Explain = Callable[[ModelFacts, ClusterSpec, Workload], tuple[Shortage, ...]]

_METHODS: dict[Parallel, tuple[_Place, _Explain]] = {
    "auto": (place_fewest, fewest_shortages),
    "pipeline": (place_pipeline, pipeline_shortages),
    "tensor": (place_tensor, tensor_shortages),
}


def place(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload, parallel: Parallel
) -> Plan | None:
    """A plan that fits, or None when memory is short.

    auto      One device if one can hold everything (the one with the most threads), else a
              pipeline over as few devices as possible, those with the most memory first.
    pipeline  A stage on every device, in the order of the cluster; layers by threads and memory.
    tensor    One stage with a shard on every device; slices by threads and memory.
    """
    return _METHODS[parallel][0](model, cluster, workload)


def place_anyhow(
    model: ModelFacts, cluster: ClusterSpec, workload: Workload, parallel: Parallel
) -> Plan | None:
    """Like `place`, but "auto" may slice layers too."""
    plan = place(model, cluster, workload, parallel)
    if plan is None and parallel == "auto" and _can_slice(model, cluster):
        plan = place_tensor(model, cluster, workload)
    return plan


def check_count(model: ModelFacts, cluster: ClusterSpec, parallel: Parallel) -> None:
    """PlanError when there are more devices than the model can be divided over in this way."""
    if parallel == "pipeline":
        check_pipeline_count(model, cluster)
    elif parallel == "tensor":
        check_tensor_count(model, cluster)


def capacity_error(
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    parallel: Parallel,
    *,
    anyhow: bool = False,
) -> CapacityError:
    """The error where `place` finds nothing, or with `anyhow` where `place_anyhow` finds nothing.

    The shortages are the least memory to add that makes the model fit, as far as each method can
    tell.
    """
    shortages = _METHODS[parallel][1](model, cluster, workload)
    finds: Callable[..., Plan | None] = place_anyhow if anyhow else place
    if anyhow and parallel == "auto" and _can_slice(model, cluster):
        sliced = tensor_shortages(model, cluster, workload)
        shortages = min(shortages, sliced, key=_missing_bytes)
    return CapacityError(
        shortages,
        context_tokens=workload.context_tokens,
        largest_context_tokens=_largest_context(
            lambda shorter: finds(model, cluster, shorter, parallel) is not None, workload
        ),
    )


def _can_slice(model: ModelFacts, cluster: ClusterSpec) -> bool:
    return len(cluster.devices) <= model.vocab_size


def _missing_bytes(shortages: tuple[Shortage, ...]) -> tuple[int, int]:
    return sum(shortage.missing_bytes for shortage in shortages), len(shortages)


def _largest_context(fits: Callable[[Workload], bool], workload: Workload) -> int | None:
    """The longest context that fits, by bisection; None when none does.

    `reserved_tokens` of the workload shrink in proportion to the context.
    """
    least, too_long = 0, workload.context_tokens
    while too_long - least > 1:
        middle = (least + too_long) // 2
        reserved = workload.reserved_tokens
        if reserved is not None:
            reserved = max(1, reserved * middle // workload.context_tokens)
        shorter = replace(workload, prompt_tokens=middle, output_tokens=0, reserved_tokens=reserved)
        if fits(shorter):
            least = middle
        else:
            too_long = middle
    return least or None
