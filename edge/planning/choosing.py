"""The plan that was asked for, chosen by partition or checked as its user wrote it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from itertools import permutations

from edge import partition
from edge.membership.identity import is_id
from edge.memory.model_sizes import model_facts
from edge.partition import Choice, ClusterSpec, LeftOut, ModelFacts, Plan
from edge.planning.load_options import LoadOptions
from edge.weights.checkpoint import Checkpoint


def facts_of(checkpoint: Checkpoint, options: LoadOptions) -> ModelFacts:
    """What each piece of the checkpoint weighs when it is loaded like this."""
    weight_format = options.weight_format(checkpoint)
    return model_facts(
        weight_format.graded(checkpoint.spec),
        weight_format,
        name=checkpoint.name,
        embedding_itemsize=checkpoint.embedding_itemsize,
        kv_dtype=options.kv_dtype,
        wire=options.wire,
    )


def choose_plan(checkpoint: Checkpoint, cluster: ClusterSpec, options: LoadOptions) -> Choice:
    """With `stream="on"` alone, layers may be read from disk. Raises a PartitionError."""
    wanted = options.plan
    facts = facts_of(checkpoint, options)
    workload = options.planned_workload(checkpoint.spec)
    chunk_tokens = options.limits(checkpoint.spec).chunk_tokens
    choose = partial(partition.choose, facts, cluster, workload, chunk_tokens=chunk_tokens)
    if not isinstance(wanted, Plan):
        return choose(parallel=wanted, stream=options.stream == "on")
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


def _is_measured(plan: Plan, cluster: ClusterSpec) -> bool:
    """Whether all that decides the speed of the plan is known, rather than supposed."""
    links = {(link.source, link.target) for link in cluster.links}
    return all(cluster.device(device).rates is not None for device in plan.devices) and all(
        pair in links for pair in permutations(plan.devices, 2)
    )


def by_id(plan: Plan, cluster: ClusterSpec) -> Plan:
    """A plan written with devices' names, which are unique, with their ids instead.

    What is an id is no name: devices choose their names, and one could go by the id of another.
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
