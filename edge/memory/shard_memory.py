"""Memory of a shard on its peer, computed from its assignment. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.memory.ledger import Use
from edge.memory.model_sizes import model_facts
from edge.memory.rebalance import RebalanceOptions
from edge.memory.step_memory import (
    Widths,
    buffer_bytes,
    further_bytes,
    head_load_bytes,
    passing_bytes,
)
from edge.memory.windows import with_windows
from edge.models.spec import ModelSpec
from edge.offload import Manifest, numpy_dtype
from edge.partition import ModelFacts, Plan, Workload, weight_tiers
from edge.partition.plan.expert_tiers import WINDOW_LAYERS
from edge.protocol.assignment import Assignment
from edge.protocol.step import StepLimits
from edge.weights.formats import KvDtype, weight_format
from edge.weights.further import further_in
from edge.weights.layout import ShardLayout, shard_layout, whole_layout

_MOST_NUMBERS = 128
"""Most numbers of streamed layers that are considered. With 4,096 layers this takes 2 s."""


def shard_use(
    assignment: Assignment,
    manifest: Manifest,
    *,
    host_bytes: int | None = None,
    streamed: int | None = None,
    has_tiles: bool = False,
) -> Use:
    """Memory of the shard. streamed: layers on disk; None: the number in its plan. has_tiles: see
    `Widths.of_shard`.

    host_bytes: host memory for a device with its own memory; None: the device has none.
    Raises PlanError of `partition` for a plan of another model.
    """
    stage, rank = assignment.stage, assignment.rank
    if streamed is not None:
        plan = with_streamed(assignment.plan, stage, rank, streamed)
        assignment = replace(assignment, plan=plan)
    facts = _facts(assignment, manifest)
    layout = shard_layout(assignment.model, assignment.plan, stage=stage, rank=rank)
    return _use(assignment, facts, layout, host_bytes, has_tiles=has_tiles)


def _facts(assignment: Assignment, manifest: Manifest) -> ModelFacts:
    """The model's sizes. Raises PlanError of `partition` for a plan of another model."""
    embeddings = [tensor for tensor in manifest.tensors if tensor.name == "embedding"]
    facts = model_facts(
        replace(assignment.model, has_further_head=False),  # it is on one shard
        assignment.weight_format,
        name=assignment.plan.model,
        embedding_itemsize=numpy_dtype(embeddings[0].dtype).itemsize if embeddings else 0,
        kv_dtype=assignment.kv_dtype,
    )
    assignment.plan.validate(facts, None, is_repaired=True)
    return facts


def _use(
    assignment: Assignment,
    facts: ModelFacts,
    layout: ShardLayout,
    host_bytes: int | None,
    *,
    has_tiles: bool,
) -> Use:
    plan, stage, rank = assignment.plan, assignment.stage, assignment.rank
    limits = assignment.limits
    workload = Workload(
        reserved_tokens=limits.cached_tokens,
        states=limits.states,
        windows=max(1, limits.windows),
    )
    # This seat only: a device with two seats has a session for each.
    use = plan.stages[stage].shards[rank].memory(plan.place(stage), facts, workload)
    widths = Widths.of_shard(
        assignment.model,
        layout,
        kv_dtype=assignment.kv_dtype,
        observes=limits.observes,
        has_tiles=has_tiles,
    )
    weight_bytes = use.weight_bytes + (0 if host_bytes is None else use.apart_bytes)
    beside_bytes = buffer_bytes(widths, limits)
    if (further := assignment.further) is not None:
        weight_bytes += further.weight_bytes
        beside_bytes += further_bytes(further, limits)
    kv_bytes = use.kv_bytes + use.state_bytes
    if layout.streamed_layers:
        # Loading a large vocabulary may take more than layers and cache do afterwards.
        head_bytes = len(layout.vocab) * facts.head_row_bytes
        load_bytes = head_bytes + head_load_bytes(layout, assignment.weight_format)
        beside_bytes = max(beside_bytes, load_bytes - weight_bytes - kv_bytes)
    taken = Use(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        buffer_bytes=beside_bytes,
        streamed_bytes=use.streamed_bytes,
    )
    if host_bytes is None or not use.streamed_bytes:
        return taken
    shard = plan.stages[stage].slices[rank]
    layers = plan.stages[stage].layers
    layer_bytes = use.streamed_layer_bytes
    tiers = weight_tiers(
        len(layers),
        streamed=shard.streamed_layers,
        window=WINDOW_LAYERS,
        layer_bytes=layer_bytes,
        host_bytes=host_bytes,
    )
    return replace(
        taken,
        streamed_bytes=tiers.on_disk * layer_bytes,
        host_bytes=tiers.host_places * layer_bytes,
    )


def check_plan(assignment: Assignment) -> None:
    """Raise PlanError, with every problem, for a plan that cannot run the model."""
    plan = assignment.plan
    facts = model_facts(
        assignment.model, assignment.weight_format, name=plan.model, embedding_itemsize=4
    )
    plan.validate(facts, None, is_repaired=True)


def host_share(free_bytes: int, assignment: Assignment, manifest: Manifest) -> int:
    """Host memory for a shard: all that it could use at any budget, less the buffer for its keys
    and values."""
    count = len(assignment.plan.stages[assignment.stage].layers)
    passing = passing_bytes(assignment.layout, assignment.limits, assignment.kv_dtype)
    most = max(0, free_bytes - passing)
    return min(most, shard_use(assignment, manifest, host_bytes=most, streamed=count).host_bytes)


def rebalance_options(
    assignment: Assignment,
    manifest: Manifest,
    *,
    host_bytes: int | None = None,
    has_tiles: bool = False,
) -> RebalanceOptions:
    """Memory of the shard with more layers on disk. has_tiles: see `Widths.of_shard`.

    With many layers only some numbers are options, because each takes time to compute.
    """
    stage, rank, plan = assignment.stage, assignment.rank, assignment.plan
    facts = _facts(assignment, manifest)
    layout = shard_layout(assignment.model, plan, stage=stage, rank=rank)
    planned, most = layout.streamed_layers, len(layout.layers)
    step = 1 + (most - planned) // _MOST_NUMBERS
    return RebalanceOptions(
        uses={
            count: _use(
                replace(assignment, plan=with_streamed(plan, stage, rank, count)),
                facts,
                layout.streaming(count),
                host_bytes,
                has_tiles=has_tiles,
            )
            for count in (*range(planned, most, step), most)
        },
        planned=planned,
    )


def most_overhead(
    spec: ModelSpec,
    limits: StepLimits,
    *,
    may_split: bool,
    stream: bool,
    kv_dtype: KvDtype,
    has_tiles: bool = False,
) -> int:
    """Most bytes that any shard of the model takes beside weights and KV cache. has_tiles: see
    `Widths.of_shard`."""
    spec = with_windows(spec, limits)
    layout = whole_layout(spec)
    widths = replace(
        Widths.of_shard(
            spec, layout, kv_dtype=kv_dtype, observes=limits.observes, has_tiles=has_tiles
        ),
        is_split=may_split,
        loose_layers=spec.num_layers if stream else 0,
    )
    further = further_in(spec, weight_format(spec, "int8"))
    return buffer_bytes(widths, limits) + (0 if further is None else further_bytes(further, limits))


def with_streamed(plan: Plan, stage: int, rank: int, count: int) -> Plan:
    """The plan with `count` layers of one shard read from disk."""
    stages = list(plan.stages)
    shards = list(stages[stage].slices)
    shards[rank] = stages[stage].slices[rank].streaming(count)
    stages[stage] = replace(stages[stage], shards=tuple(shards))
    return replace(plan, stages=tuple(stages))
