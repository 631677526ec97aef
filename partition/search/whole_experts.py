"""Which device has which whole experts, by the tokens of each expert and by memory.

Where experts are cut by columns, a device has the same part of their memory and of their work.
Whole experts separate the two: a fast device with little memory has the few most used experts, and
a slow one with much memory has the others. The assignment minimises the mean time until the slowest
device is done. HiGHS solves it as integer programs (as in MoETuner, Go and Mahajan, 2025). The
first program finds the number of experts of each device, the same for all layers. Then one program
for each layer finds which experts these are. With many experts, the first program's assignment by
rank is used instead, and experts are exchanged as long as the slowest device gets faster.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge.partition.cost.estimate import Estimate, estimate
from edge.partition.cost.expert_load import chances
from edge.partition.cost.pace import Pace, decode_phase
from edge.partition.errors import PlanError
from edge.partition.fit.check import check_fit
from edge.partition.fit.memory import memory_use
from edge.partition.plan.facts import ClusterSpec, LayerFacts, ModelFacts, Workload
from edge.partition.plan.plan import Plan, Stage
from edge.partition.plan.shard import Experts

_GAP = 0.005
"""Relative distance to the best placement that is good enough."""

_MOST_SOLVED = 256
"""A program is solved for a layer with at most this many experts times devices; it takes 0.1 s or
less."""

_MOST_EXCHANGED = 64
"""The most exchanges of two experts of one layer."""

_MOST_NODES = 500
"""The most nodes of one program's search tree. A limit of time instead would not give the same
placement for the same facts."""


def with_whole_experts(
    plan: Plan, model: ModelFacts, cluster: ClusterSpec, workload: Workload, *, chunk_tokens: int
) -> tuple[Plan, Estimate | None]:
    """The plan with whole experts in each stage that several devices share, and its estimate. The
    estimate is None where some device was not measured; then speed counts as proportional to
    threads.

    Raises PlanError where no stage can have whole experts, CapacityError where the plan does not
    fit.
    """
    stages = list(plan.stages)
    problems: list[str] = []
    for number, stage in enumerate(stages):
        if len(stage.shards) > 1:
            try:
                stages[number] = _placed(plan, number, model, cluster, workload)
            except PlanError as error:
                problems += error.problems
    placed = replace(plan, stages=tuple(stages))
    if placed == plan:
        shared = "No stage of the plan is shared by several devices; a tensor plan has one."
        raise PlanError(problems or [shared])
    check_fit(placed, model, cluster, workload)
    if any(cluster.device(device).rates is None for device in placed.devices):
        return placed, None
    return placed, estimate(placed, model, cluster, workload, chunk_tokens=chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """How many experts of a layer a device of a stage may have, and their time."""

    others_s: float
    """Seconds of the layer without its experts."""
    expert_s: float
    """Seconds of an expert that every token goes through."""
    most: int
    """The most experts of each layer that fit."""


def _placed(
    plan: Plan, number: int, model: ModelFacts, cluster: ClusterSpec, workload: Workload
) -> Stage:
    stage = plan.stages[number]
    sparse = [layer for layer in stage.layers if model.kinds[model.layers[layer]].num_experts]
    kinds = {
        (kind.num_experts, kind.top_k, kind.is_grouped)
        for kind in (model.kinds[model.layers[layer]] for layer in sparse)
    }
    if not kinds:
        raise PlanError([f"Stage {number} has no layer with experts; use experts='columns'."])
    if len(kinds) > 1:
        raise PlanError(
            [f"The experts of stage {number} differ between layers; cut their columns."]
        )
    ((num_experts, _top_k, is_grouped),) = kinds
    if is_grouped:
        raise PlanError(["The model chooses experts by groups; cut their columns."])
    if any(shard.streamed_layers for shard in stage.slices):
        raise PlanError(
            [
                f"Stage {number} reads layers from disk, so its experts are cached by their use;"
                " cut their columns."
            ]
        )
    facts = model.kinds[model.layers[sparse[0]]]
    ranks = [
        rank
        for rank, shard in enumerate(stage.slices)
        if all(shard.slice(model.layers[layer]).ffn_columns for layer in sparse)
    ]
    if len(ranks) < 2 or num_experts < len(ranks):
        raise PlanError([f"Stage {number} has its experts on one device; cut their columns."])
    devices = _devices(plan, number, ranks, sparse, model, cluster, workload)
    ranked = [sorted(chances(model, layer), reverse=True) for layer in sparse]
    mean = [sum(own) / len(sparse) for own in zip(*ranked, strict=True)]
    owners = _solve(devices, mean, facts)
    if owners is None:
        raise PlanError(
            [
                f"The devices of stage {number} have no room for whole experts; cut their columns,"
                " or give more memory."
            ]
        )
    counts = [owners.count(index) for index in range(len(ranks))]
    own: list[dict[int, tuple[int, ...]]] = [{} for _ in stage.shards]
    for layer in sparse:
        uses = chances(model, layer)
        found = None
        if len(devices) * num_experts <= _MOST_SOLVED:
            found = _solve(devices, uses, facts, counts=counts)
        if found is None:
            found = _exchanged(devices, uses, _by_rank(uses, owners))
        for index, rank in enumerate(ranks):
            own[rank][layer] = tuple(e for e, owner in enumerate(found) if owner == index)
    shards = tuple(
        shard.with_experts(_of_layers(own[rank], stage.layers))
        for rank, shard in enumerate(stage.slices)
    )
    return replace(stage, shards=shards)


def _of_layers(own: dict[int, tuple[int, ...]], layers: range) -> Experts:
    return tuple(own.get(layer, ()) for layer in layers) if own else ()


def _devices(
    plan: Plan,
    number: int,
    ranks: Sequence[int],
    sparse: Sequence[int],
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
) -> list[_Device]:
    stage, use = plan.stages[number], memory_use(plan, model, workload)
    facts = model.kinds[model.layers[sparse[0]]]
    expert_bytes = max(model.kinds[model.layers[layer]].expert_bytes for layer in sparse)
    found = []
    for rank in ranks:
        shard = stage.slices[rank]
        device = cluster.device(shard.device)
        own = shard.slice(model.layers[sparse[0]])
        held = sum(
            shard.slice(model.layers[layer]).layer_bytes(model.kinds[model.layers[layer]]).experts
            for layer in sparse
        )
        room = device.memory_bytes - use[device.id].total + held
        most = facts.num_experts
        if expert_bytes:
            most = min(most, room // (expert_bytes * len(sparse)))
        others_s, expert_s = 0.0, 1.0 / device.threads
        if device.rates is not None:
            pace = Pace.of(
                device, decode_phase(workload), in_stage=len(stage.shards), is_crowded=False
            )
            others_s = pace.with_whole_experts(facts, len(own.ffn_columns), 0.0).total_s
            each = pace.with_whole_experts(facts, len(own.ffn_columns), 1 / facts.top_k).total_s
            expert_s = each - others_s
        found.append(_Device(others_s=others_s, expert_s=expert_s, most=most))
    return found


def _by_rank(uses: Sequence[float], owners: Sequence[int]) -> list[int]:
    """The owner of each expert. owners: of the most used expert, of the next, and so on."""
    order = sorted(range(len(uses)), key=lambda each: -uses[each])
    found = [0] * len(uses)
    for expert, owner in zip(order, owners, strict=True):
        found[expert] = owner
    return found


def _exchanged(
    devices: Sequence[_Device], uses: Sequence[float], owners: Sequence[int]
) -> list[int]:
    """The owners after exchanging experts one for one, until that no longer makes the slowest
    device faster."""
    found = list(owners)
    times = [each.others_s for each in devices]
    for expert, owner in enumerate(found):
        times[owner] += devices[owner].expert_s * uses[expert]
    for _turn in range(_MOST_EXCHANGED):
        slowest = max(range(len(devices)), key=lambda index: times[index])
        own = [expert for expert, owner in enumerate(found) if owner == slowest]
        best: tuple[float, int, int] | None = None
        for other, device in enumerate(devices):
            if other == slowest:
                continue
            theirs = sorted(
                (uses[expert], expert) for expert, owner in enumerate(found) if owner == other
            )
            # The chance to move so that both are done at the same time.
            both_s = devices[slowest].expert_s + device.expert_s
            wished = (times[slowest] - times[other]) / both_s if both_s else 0.0
            for expert in own:
                at = bisect.bisect(theirs, (uses[expert] - wished, -1))
                for use, given in theirs[max(0, at - 1) : at + 1]:
                    moved = uses[expert] - use
                    seconds = max(
                        times[slowest] - devices[slowest].expert_s * moved,
                        times[other] + device.expert_s * moved,
                    )
                    if best is None or seconds < best[0]:
                        best = seconds, expert, given
        if best is None or best[0] >= times[slowest] * (1 - _GAP):
            break
        _seconds, expert, given = best
        other, moved = found[given], uses[expert] - uses[given]
        times[slowest] -= devices[slowest].expert_s * moved
        times[other] += devices[other].expert_s * moved
        found[expert], found[given] = other, slowest
    return found


def _solve(
    devices: Sequence[_Device],
    uses: Sequence[float],
    facts: LayerFacts,
    *,
    counts: Sequence[int] | None = None,
) -> list[int] | None:
    """The device of each expert: `counts` experts for each device, or any number from 1 to the most
    that fits. None where that is impossible, or was not found within the limits."""
    if sum(each.most for each in devices) < facts.num_experts or min(e.most for e in devices) < 1:
        return None
    solver = _silent_solver()
    for name, value in (
        ("threads", 1), ("random_seed", 1), ("mip_rel_gap", _GAP), ("mip_max_nodes", _MOST_NODES),
    ):  # fmt: skip
        solver.setOptionValue(name, value)
    # The solver's tolerances are absolute, so times are scaled to about 1.
    unit_s = max(each.others_s + facts.top_k * each.expert_s for each in devices)
    slowest = solver.addVariable(lb=0.0)
    has = [[solver.addBinary() for _ in uses] for _ in devices]
    for device, own in zip(devices, has, strict=True):
        work = sum(
            (device.expert_s / unit_s * chance) * each
            for chance, each in zip(uses, own, strict=True)
        )
        solver.addConstr(work + device.others_s / unit_s <= slowest)
    for each in zip(*has, strict=True):
        solver.addConstr(sum(each) == 1)
    for index, (device, own) in enumerate(zip(devices, has, strict=True)):
        if counts is not None:
            solver.addConstr(sum(own) == counts[index])
        else:
            solver.addConstr(sum(own) >= 1)
            solver.addConstr(sum(own) <= device.most)
    solver.minimize(slowest)
    if solver.getInfo().primal_solution_status != 2:  # feasible
        return None
    values = solver.getSolution().col_value
    return [
        max(range(len(devices)), key=lambda index: values[has[index][expert].index])
        for expert in range(len(uses))
    ]


def _silent_solver() -> Any:
    import highspy  # takes 0.1 s; only plans with whole experts need it

    class Silent(highspy.Highs):  # type: ignore[misc]
        """A solver without output. HiGHS prints a banner when it is made, before any option can be
        set."""

        def enableCallbacks(self) -> Any:  # noqa: N802
            self.setOptionValue("output_flag", False)
            return super().enableCallbacks()

    return Silent()
