"""The choice of a plan: the least time of a whole answer, by measured rates.

The time is first_token_s + output_tokens x token_s, as `estimate` predicts them. A plan is one
device, a pipeline, slices of layers or any mixture. Devices that would slow it down are left out.
How exact the search is, `branch_and_bound` says. Unmeasured devices are used only where the
measured ones do not have enough memory; then `placement` divides by threads and memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import get_args

from edge.partition.cost.contention import shares_host
from edge.partition.cost.estimate import Estimate
from edge.partition.cost.pace import CHUNK_TOKENS
from edge.partition.errors import CapacityError, PlanError
from edge.partition.fit.placement import Parallel, capacity_error, check_count, place, place_anyhow
from edge.partition.fit.streamed_layers import streaming_plans
from edge.partition.plan.facts import ClusterSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan
from edge.partition.search.arrangements import all_arrangements, neighbours, swaps
from edge.partition.search.branch_and_bound import (
    EXACT_DEVICES,
    MOST_SOLVED,
    MOST_SOLVED_OF_MANY,
    Search,
    Solved,
    kind,
)
from edge.partition.search.left_out import LeftOut, left_out
from edge.partition.search.situation import Arrangement, Situation

_MOST_RUNNERS_UP = 5

LEAST_GAIN = 0.05
"""The least part of the time that a further device must save. Predictions are no more exact than
this, and every further device can be lost."""

LEAST_GAIN_ON_ONE_HOST = 0.15
"""The same where devices share cores and memory, because their speeds vary from minute to minute.
The last 30 plans of peers on two cores were up to 10 % slower than predicted, and those of other
days up to 57 % (`local_cluster.csv`)."""

Planned = tuple[Plan, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """The best device alone."""

    device: str
    """Its id."""
    name: str
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, its prediction, and the alternatives."""

    plan: Plan
    predicted: Estimate | None
    """None when some device of the plan has no rates."""
    solo: Solo | None
    """None when no device can run the model alone, or without a prediction."""
    left_out: tuple[LeftOut, ...]
    """Every device that the plan does not use; empty without a prediction."""
    runners_up: tuple[tuple[Plan, Estimate], ...]
    """Other plans, best first: over other groups of devices, or with layers read from disk."""


def choose(
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    parallel: Parallel = "auto",
    chunk_tokens: int = CHUNK_TOKENS,
    stream: bool = False,
    exact_devices: int = EXACT_DEVICES,
) -> Choice:
    """A valid plan, version 1, that fits the memory of every device that it uses.

    auto      The fastest plan: one device, whole layers, slices, or a mixture, over any devices.
              A further device must save a part of the time that is worth it (LEAST_GAIN).
    pipeline  A stage on every device, with the best order and numbers of layers.
    tensor    One stage with a shard on every device, with the best shares.

    exact_devices: with more devices, not every arrangement is searched; 5 devices take 10 times as
    long as 4. stream: layers may be read from disk for each step, where nothing else fits or
    everything else is slower.

    Ties go to fewer devices, then to the order of the cluster. The same facts always give the same
    choice. Raises CapacityError when memory is short, PlanError when there are no devices or too
    many for this model, ValueError for an unknown `parallel`.
    """
    if parallel not in get_args(Parallel):
        allowed = ", ".join(map(repr, get_args(Parallel)))
        raise ValueError(f"parallel must be one of {allowed}, not {parallel!r}.")
    if not cluster.devices:
        raise PlanError(["The cluster has no devices; start a peer on at least one."])
    check_count(model, cluster, parallel)
    unmeasured = [device.id for device in cluster.devices if device.rates is None]
    if not unmeasured:
        search = Search(Situation(model, cluster, workload, chunk_tokens))
        return _measured_choice(search, parallel, stream=stream, exact_devices=exact_devices)
    known = cluster.without(*unmeasured)
    of_known = partial(
        choose, model, known, workload, chunk_tokens=chunk_tokens, exact_devices=exact_devices
    )
    for streams in (False, True) if stream else (False,):
        if parallel == "auto" and known.devices:
            with suppress(CapacityError):
                choice = of_known(stream=streams)
                if stream != streams:  # it fits, but reading from disk may be faster
                    choice = of_known(stream=stream)
                return _without_unmeasured(choice, cluster)
        plan = (
            next(streaming_plans(model, cluster, workload, parallel), None)
            if streams
            else place(model, cluster, workload, parallel)
        )
        if plan is not None:
            return Choice(plan=plan, predicted=None, solo=None, left_out=(), runners_up=())
    raise capacity_error(model, cluster, workload, parallel)


def _without_unmeasured(choice: Choice, cluster: ClusterSpec) -> Choice:
    """A choice among the measured devices; the others are listed as left out, with the reason."""
    reasons = {each.device: each.reason for each in choice.left_out}
    return replace(
        choice,
        left_out=tuple(
            LeftOut(
                device=device.id,
                name=device.name,
                reason=reasons.get(device.id, "it was not measured, so its speed is not known"),
            )
            for device in cluster.devices
            if device.rates is None or device.id in reasons
        ),
    )


def _measured_choice(
    search: Search, parallel: Parallel, *, stream: bool, exact_devices: int
) -> Choice:
    situation = search.situation
    model, cluster, workload = situation.model, situation.cluster, situation.workload
    alone = search.best(_alone(search), most=len(situation.devices))
    own = _of_different_kinds(search, alone[:1])
    plans = _of_different_kinds(search, _solve(search, parallel, exact_devices))
    if parallel == "auto" and not any(len(plan.devices) == 1 for plan, _ in plans):
        plans += own
    if not plans:  # where memory is short, placing by memory may find what the search misses
        plan = place_anyhow(model, cluster, workload, parallel)
        plans = [] if plan is None else [(plan, search.estimate(plan))]
    streamed: list[Planned] = []
    if stream:
        candidates = streaming_plans(model, cluster, workload, parallel)
        streamed = [(plan, search.estimate(plan)) for plan in candidates if plan.streamed_layers]
    if not plans and not streamed:
        raise capacity_error(model, cluster, workload, parallel, anyhow=True)
    ranked = sorted([*plans, *streamed], key=search.total_s)
    if parallel == "auto":
        ranked = _worth_it(ranked, search)
    (plan, predicted), *others = ranked
    return Choice(
        plan=plan,
        predicted=predicted,
        solo=_solo(search, [*own, *streamed]),
        left_out=left_out(search, _arrangement(search, plan), predicted),
        runners_up=tuple(others[:_MOST_RUNNERS_UP]),
    )


def _worth_it(ranked: Sequence[Planned], search: Search) -> list[Planned]:
    """The plans, first the one with the fewest devices that is nearly as fast as the fastest; plans
    without streaming are preferred."""
    devices = [search.situation.cluster.device(id) for id in ranked[0][0].devices]
    shared = any(shares_host(devices, device) for device in devices)
    least_gain = LEAST_GAIN_ON_ONE_HOST if shared else LEAST_GAIN
    enough_s = (1 + least_gain) * search.total_s(ranked[0])
    first = min(
        (each for each in ranked if search.total_s(each) <= enough_s),
        key=lambda each: (each[0].streamed_layers > 0, len(each[0].devices)),
    )
    return [first, *(each for each in ranked if each is not first)]


def _of_different_kinds(search: Search, solved: Sequence[Solved]) -> list[Planned]:
    """The best and a few runners-up over other groups of devices."""
    kinds: set[object] = set()
    plans: list[Planned] = []
    for each in solved:
        if kind(each.arrangement) not in kinds and len(plans) <= _MOST_RUNNERS_UP:
            kinds.add(kind(each.arrangement))
            plans.append((plan := search.plan(each), search.estimate(plan)))
    return plans


def _arrangement(search: Search, plan: Plan) -> Arrangement:
    numbers = {device.id: number for number, device in enumerate(search.situation.devices)}
    return tuple(tuple(numbers[shard.device] for shard in stage.shards) for stage in plan.stages)


def _alone(search: Search) -> list[Arrangement]:
    return [((index,),) for index in range(len(search.situation.devices))]


def _solo(search: Search, plans: Sequence[Planned]) -> Solo | None:
    """The fastest plan on one device, as a Solo; None where there is none."""
    alone = [each for each in plans if len(each[0].devices) == 1]
    if not alone:
        return None
    plan, predicted = min(alone, key=search.total_s)
    device = search.situation.cluster.device(plan.devices[0])
    return Solo(device=device.id, name=device.name, estimate=predicted)


def describe_plan_in_words(plan: Plan, cluster: ClusterSpec) -> str:
    """One line: `a: layers 0-11 | b + c: layers 12-21, heads 20:12`."""
    stages: list[str] = []
    for stage in plan.stages:
        names = " + ".join(cluster.device(shard.device).name for shard in stage.shards)
        words = f"{names}: layers {stage.layers.start}-{stage.layers.stop - 1}"
        streamed = max(shard.streamed_layers for shard in stage.slices)
        if streamed:
            has_host = any(
                cluster.device(shard.device).host_memory_bytes is not None for shard in stage.shards
            )
            words += f" (the last {streamed} {'streamed' if has_host else 'from disk'})"
        if len(stage.shards) > 1:
            kinds = range(1 + max(len(shard.further) for shard in stage.slices))
            cuts = [
                ":".join(str(len(shard.slice(kind).heads)) for shard in stage.slices)
                for kind in kinds
            ]
            words += f", heads {' and '.join(dict.fromkeys(cuts))}"
        stages.append(words)
    return " | ".join(stages)


def _solve(search: Search, parallel: Parallel, exact_devices: int) -> list[Solved]:
    everyone = tuple(range(len(search.situation.devices)))
    few = len(everyone) <= exact_devices
    if parallel == "auto":
        if few:
            return search.best(
                all_arrangements(everyone), most=MOST_SOLVED, nearly=LEAST_GAIN_ON_ONE_HOST
            )
        found = search.descend(_starts(search), lambda here: neighbours(here, everyone))
        return search.best(found, most=MOST_SOLVED_OF_MANY, nearly=LEAST_GAIN_ON_ONE_HOST)
    if few:
        orders: Iterator[Arrangement] = (_as(parallel, order) for order in permutations(everyone))
        return search.best(orders, most=MOST_SOLVED)
    found = search.descend([_as(parallel, everyone)], swaps)
    return search.best(found, most=MOST_SOLVED_OF_MANY)


def _as(parallel: Parallel, order: tuple[int, ...]) -> Arrangement:
    return (order,) if parallel == "tensor" else tuple((index,) for index in order)


def _starts(search: Search) -> list[Arrangement]:
    """The fastest single device, the shortest pipeline, one stage of all devices, and hosts as
    stages."""
    situation = search.situation
    everyone = tuple(range(len(situation.devices)))
    hosts: dict[str, list[int]] = {}
    for index, device in enumerate(situation.devices):
        hosts.setdefault(device.host or f"alone {index}", []).append(index)
    largest = sorted(everyone, key=lambda index: -situation.devices[index].memory_bytes)
    chains = [_as("pipeline", tuple(largest[:count])) for count in range(1, len(largest) + 1)]
    fastest = min(_alone(search), key=search.bound_s)
    starts = [
        fastest,
        next((chain for chain in chains if search.bound_s(chain) < float("inf")), chains[-1]),
        _as("tensor", everyone),
        tuple(tuple(group) for group in hosts.values()),
    ]
    return list(dict.fromkeys(starts))
