"""The plan of a load: chosen by `partition`, or written by the user and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations

from edge import partition
from edge.host.cache_paths import cache_root
from edge.membership.identity import is_id
from edge.memory.model_sizes import model_facts
from edge.memory.windows import with_windows
from edge.partition import (
    LEAST_GAIN,
    Choice,
    ClusterSpec,
    Estimate,
    LeftOut,
    ModelFacts,
    Plan,
    Workload,
)
from edge.planning.load_options import ExpertCut, LoadOptions
from edge.planning.load_sizes import LoadSizes
from edge.protocol.step import StepLimits
from edge.weights.checkpoint import Checkpoint
from edge.weights.expert_uses import known_expert_uses

_MOST_PLACED = 2
"""Plans that are tried with whole experts, the best first; placing them takes a while."""


def facts_of(checkpoint: Checkpoint, options: LoadOptions, limits: StepLimits) -> ModelFacts:
    """Bytes of each piece of the checkpoint in the formats of these options."""
    weight_format = options.weight_format(checkpoint)
    return model_facts(
        with_windows(weight_format.graded(checkpoint.spec), limits),
        weight_format,
        name=checkpoint.name,
        embedding_itemsize=checkpoint.embedding_itemsize,
        kv_dtype=options.kv_dtype,
        wire=options.wire,
        expert_uses=known_expert_uses(cache_root(), checkpoint.store.fingerprint, checkpoint.spec),
    )


def choose_plan(
    checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions, sizes: LoadSizes
) -> Choice:
    """The plan that `options` ask for, for these sizes. Raises a PartitionError."""
    wanted = options.plan
    facts = facts_of(checkpoint, options, sizes.limits)
    workload, chunk_tokens = sizes.workload, sizes.limits.chunk_tokens
    choose = partial(partition.choose, facts, cluster, workload, chunk_tokens=chunk_tokens)
    if not isinstance(wanted, Plan):
        choice = choose(parallel=wanted, stream=sizes.stream)
        place = partial(
            partition.with_whole_experts,
            model=facts,
            cluster=cluster,
            workload=workload,
            chunk_tokens=chunk_tokens,
        )
        return _with_whole_experts(choice, place, facts, cluster, workload, options.experts)
    plan = by_id(wanted, cluster)
    partition.check_fit(plan, facts, cluster, workload)
    predicted = solo = None
    if _is_measured(plan, cluster):
        predicted = partition.estimate(plan, facts, cluster, workload, chunk_tokens=chunk_tokens)
    with contextlib.suppress(partition.PartitionError):
        solo = choose().solo  # the best device alone, to compare with
    return Choice(
        plan=plan,
        predicted=predicted,
        solo=solo,
        left_out=tuple(
            LeftOut(device=device.id, name=device.name, reason="the plan by hand does not use it")
            for device in cluster.devices
            if device.id not in plan.devices
        ),
        runners_up=(),
    )


def _with_whole_experts(
    choice: Choice,
    place: Callable[[Plan], tuple[Plan, Estimate | None]],
    facts: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    wanted: ExpertCut,
) -> Choice:
    """The choice with whole experts, where they are asked for or predicted to be faster.

    Raises PlanError where they are asked for and impossible.
    """
    if wanted == "whole" and len(choice.plan.devices) > 1:
        plan, predicted = place(choice.plan)
        return replace(choice, plan=plan, predicted=predicted)
    if wanted != "auto" or not facts.expert_uses or choice.predicted is None:
        return choice
    ranked = [(choice.plan, choice.predicted), *choice.runners_up]
    found: list[tuple[Plan, Estimate]] = []
    for plan, _predicted in ranked[:_MOST_PLACED]:
        with contextlib.suppress(partition.PartitionError):
            placed, estimate = place(plan)
            if estimate is not None:
                found.append((placed, estimate))
    if not found:
        return choice
    plan, predicted = min(found, key=lambda each: each[1].total_s(workload))
    if predicted.total_s(workload) > (1 - LEAST_GAIN) * choice.predicted.total_s(workload):
        return choice
    left_out = tuple(each for each in choice.left_out if each.device not in plan.devices)
    left_out += tuple(
        LeftOut(
            device=device.id,
            name=device.name,
            reason="answers are faster with whole experts on the other devices",
        )
        for device in cluster.devices
        if device.id in choice.plan.devices and device.id not in plan.devices
    )
    return replace(
        choice, plan=plan, predicted=predicted, left_out=left_out, runners_up=tuple(ranked)
    )


def _is_measured(plan: Plan, cluster: ClusterSpec) -> bool:
    """Whether all devices of the plan and all links between them were measured."""
    links = {(link.source, link.target) for link in cluster.links}
    return all(cluster.device(device).rates is not None for device in plan.devices) and all(
        pair in links for pair in permutations(plan.devices, 2)
    )


def by_id(plan: Plan, cluster: ClusterSpec) -> Plan:
    """The plan with devices' ids in place of their names, which are unique.

    A name that has the form of an id is ignored: devices choose their names, and one could take the
    id of another.
    """
    names = {device.name: device.id for device in cluster.devices if not is_id(device.name)}
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    shard.on(names.get(shard.device, shard.device)) for shard in stage.shards
                ),
            )
            for stage in plan.stages
        ),
    )
