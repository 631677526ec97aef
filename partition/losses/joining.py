"""Whether a running model moves to another plan after devices have joined or changed their pace. A
pure decision.

A move pays for itself if an answer has more tokens a minute later with the move than without it.
Weights are sent while answers go on. Then answers wait until the devices have loaded and their
prompts and tokens are computed again. After that they go on faster.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations
from typing import Literal

from edge.partition.cost.estimate import Estimate, estimate
from edge.partition.cost.pace import CHUNK_TOKENS
from edge.partition.errors import PartitionError
from edge.partition.fit.placement import Parallel
from edge.partition.losses.holdings import Seat
from edge.partition.losses.repair import Repair, Task
from edge.partition.plan.facts import ClusterSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan

HORIZON_S = 60.0
"""A move must pay for itself within this time."""

LEAST_GAIN = 1.1
"""Least ratio of tokens with a move to tokens without it: predictions err by as much."""

LEAST_GAIN_BACK = 1.03
"""The same where a device is healthy again that was slowed: without it, a model would stay on a
plan that is up to a tenth slower than the one that it had."""

SHIPPING_COSTS = 0.1
"""Part of the sending time that answers lose meanwhile. An assumption: sending computes little, but
uses the network and disks."""

_MOST_SEATED = 64
"""The most ways to give seats to devices without a seat."""

When = Literal["now", "idle", "stay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """The answers that wait while a model moves; all 0 where there are none."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all requests together, because prompts are computed one after the other."""
    answer_tokens: int = 0
    """Tokens so far of the longest answer, because answers are computed again side by side."""
    left_tokens: int = 0
    """Tokens that the longest answer may still get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The decision on a running plan after the cluster has changed: stay, or move to another
    plan."""

    when: When
    """now; idle: as soon as no answer is under way; stay: never."""
    to: Repair | None
    """The better plan, and what it needs; None: no plan is better."""
    before: Estimate | None
    """Estimate of the plan that runs; None where a device of it has no rates."""
    ships_s: float = 0.0
    """Seconds until devices have the weights that they lack on disk, while answers go on."""
    pause_s: float = 0.0
    """Seconds after that until answers go on."""
    gained_tokens: float | None = None
    """Tokens that each answer gains in HORIZON_S, or until it ends if that is sooner; None where a
    plan has no prediction."""


def join(
    plan: Plan,
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    under_way: UnderWay,
    *,
    wanted: Plan | None = None,
    same_bits: Collection[str] | None = None,
    cached: Mapping[str, Collection[Seat]] | None = None,
    send_bytes_per_s: Mapping[str, float] | None = None,
    parallel: Parallel = "auto",
    chunk_tokens: int = CHUNK_TOKENS,
    stream: bool = False,
    further_seat_bytes: int = 0,
    is_healthy_again: bool = False,
) -> Move:
    """Whether `plan` gives way to another plan over the devices of `cluster`, and when.

    cluster       All devices that are present. Memory is what they have without this model.
    workload      The workload that the plan was chosen for.
    wanted        A plan by hand; no other is considered. Without rates it counts as better.
    is_healthy_again  A slowed device takes its usual time again: less gain is enough.
    same_bits     Devices that compute the same bits as those of the plan; None: all.

    The other arguments are those of `repair`. While answers are under way, only plans over devices
    of `same_bits` that sum in the same order are considered, so that the tokens to come do not
    change. Without rates, a plan that reads layers from disk gives way to one that does not.

    Raises PlanError for a plan that is not one of this model.
    """
    plan.validate(model, None, is_repaired=True)
    task = Task(
        plan=plan,
        model=model,
        cluster=cluster,
        workload=workload,
        cached=cached or {},
        send_bytes_per_s=send_bytes_per_s or {},
        parallel=parallel,
        chunk_tokens=chunk_tokens,
        stream=stream,
        keeps_shape=False,
        further_seat_bytes=further_seat_bytes,
    )
    before = None
    if all(cluster.device(id).rates is not None for id in plan.devices):
        before = estimate(plan, model, cluster, workload, chunk_tokens=chunk_tokens)
    choosing = _Choosing(
        task=task,
        before=before,
        under_way=under_way,
        is_wished=wanted is not None,
        least_gain=LEAST_GAIN_BACK if is_healthy_again else LEAST_GAIN,
        same_bits=frozenset(task.devices if same_bits is None else same_bits),
    )
    others = dict.fromkeys(_others(task, wanted))
    return choosing.best([task.repaired(each, "planned") for each in others])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choosing:
    """The facts by which plans are compared."""

    task: Task
    before: Estimate | None
    under_way: UnderWay
    is_wished: bool
    least_gain: float
    same_bits: frozenset[str]

    def best(self, found: list[Repair]) -> Move:
        """The better plan with the most tokens, or the decision to stay."""
        none = UnderWay()
        if self.under_way.requests:
            alike = [
                each
                for each in found
                if each.same_sums and self.same_bits.issuperset(each.plan.devices)
            ]
            if (move := self._first(alike, self.under_way, "now")) is not None:
                return move
        move = self._first(found, none, "idle" if self.under_way.requests else "now")
        return move or Move(when="stay", to=None, before=self.before)

    def _first(self, found: list[Repair], under_way: UnderWay, when: When) -> Move | None:
        moves = [move for each in found if (move := self._move(each, under_way, when)) is not None]
        timed = [move for move in moves if move.gained_tokens is not None]
        if not timed:
            return min(moves, key=lambda move: move.pause_s, default=None)

        def key(move: Move) -> tuple[float, tuple[str, ...]]:
            assert move.to is not None
            assert move.gained_tokens is not None
            return -move.gained_tokens, move.to.plan.devices

        return min(timed, key=key)

    def _move(self, to: Repair, under_way: UnderWay, when: When) -> Move | None:
        """The move to a plan, or None where it is not better."""
        before, after, workload = self.before, to.predicted, self.task.workload
        ships_s, pause_s = self.task.ships_s(to.plan), self.task.loads_s(to.plan)
        gained = None
        if before is None or after is None:
            # Without a prediction it is unknown how long answers would wait.
            leaves_disk = self.task.plan.streamed_layers and not to.plan.streamed_layers
            if under_way.requests or not (self.is_wished or leaves_disk):
                return None
        else:
            pause_s += under_way.prompt_tokens * after.first_token_s / workload.prompt_tokens
            pause_s += under_way.answer_tokens * after.token_s
            within_s = HORIZON_S
            if under_way.requests:
                within_s = min(HORIZON_S, under_way.left_tokens * before.token_s)
            moving_s = pause_s + SHIPPING_COSTS * ships_s
            without = within_s / before.token_s
            gained = max(0.0, within_s - moving_s) / after.token_s - without
            is_slower = after.total_s(workload) >= before.total_s(workload)
            if gained < (self.least_gain - 1) * without or is_slower:
                return None
        return Move(
            when=when,
            to=to,
            before=before,
            ships_s=ships_s,
            pause_s=pause_s,
            gained_tokens=gained,
        )


def _others(task: Task, wanted: Plan | None) -> Iterator[Plan]:
    """Plans to compare with the running one; some may come more than once."""
    if wanted is not None:
        if wanted.stages != task.plan.stages and task.devices.keys() >= set(wanted.devices):
            yield from task.fitting(task.version(wanted.stages))
        return
    spare = [id for id in task.devices if id not in task.loaded]
    with suppress(PartitionError):
        yield from _unlike(task, task.planned())
    if task.parallel == "auto":
        # Pipelines sum nothing, so they have the same bits as each other.
        for left_out in ((), [id for id in task.loaded if id in task.devices]):
            if len(left_out) < len(task.devices):
                part = task.cluster.without(*left_out)
                with suppress(PartitionError):
                    yield from _unlike(task, task.planned(part, "pipeline"))
    if len(task.plan.shares) > len(task.plan.stages):
        yield from _seated(task, spare)


def _unlike(task: Task, plans: Iterator[Plan]) -> Iterator[Plan]:
    yield from (each for each in plans if each.stages != task.plan.stages)


def _seated(task: Task, spare: list[str]) -> Iterator[Plan]:
    """The plan as it is, with some of its seats given to devices without a seat."""
    ways = (
        dict(zip(seats, devices, strict=True))
        for count in range(1, min(len(spare), len(task.seats)) + 1)
        for seats in combinations(task.seats, count)
        for devices in permutations(spare, count)
    )
    for taken in islice(ways, _MOST_SEATED):
        stages = tuple(
            replace(
                stage,
                shards=tuple(
                    shard.on(taken.get((number, rank), shard.device)).streaming(0)
                    for rank, shard in enumerate(stage.slices)
                ),
            )
            for number, stage in enumerate(task.plan.stages)
        )
        yield from task.fitting(task.version(stages))
