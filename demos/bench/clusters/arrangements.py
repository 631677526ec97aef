"""Which plans a cluster is run with: the chosen one, single devices, and the rest of what fits.

Made by the planner's own search, so every arrangement has the layers and shares that suit it best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edge.planning.proposal import Proposal
from partition import ClusterSpec, Estimate, PartitionError, Plan, choose, estimate
from partition.search.arrangements import all_arrangements, is_canonical, twins
from partition.search.branch_and_bound import Search, Solved, kind
from partition.search.situation import Arrangement, Situation

MOST_RUNNERS_UP = 1
"""Run beside the chosen plan where not everything is."""

MOST_TIMES = 1.5
"""Nor are single devices so much slower than the fastest: they take long and tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plan, and how fast it should be."""

    plan: Plan
    predicted: Estimate

    @property
    def is_solo(self) -> bool:
        return len(self.plan.devices) == 1


def options(proposal: Proposal, *, everything: bool) -> tuple[Option, ...]:
    """The chosen plan first, then single devices, then others, each by falling predicted speed.

    Devices that equal each other are not told apart. Every device must have been measured.
    """
    count = len(proposal.cluster.devices)
    chosen = Option(plan=proposal.plan, predicted=_predicted(proposal, proposal.plan))
    if everything:
        others = _best(proposal, all_arrangements(range(count)))
    else:
        others = _within_reach(_best(proposal, [((index,),) for index in range(count)]))
        others += [
            Option(plan=plan, predicted=predicted)
            for plan, predicted in proposal.choice.runners_up[:MOST_RUNNERS_UP]
            if len(plan.devices) > 1
        ]
    others = [each for each in others if each.plan != chosen.plan]
    others.sort(key=lambda each: (not each.is_solo, each.predicted.total_s(proposal.workload)))
    return (chosen, *others)


def _within_reach(alone: Sequence[Option]) -> list[Option]:
    least_s = min((each.predicted.token_s for each in alone), default=0.0)
    return [each for each in alone if each.predicted.token_s <= MOST_TIMES * least_s]


def _best(proposal: Proposal, arrangements: Iterable[Arrangement]) -> list[Option]:
    """The best plan that fits of each of these, whatever the order of ranks."""
    search = Search(
        Situation(proposal.model, proposal.cluster, proposal.workload, proposal.chunk_tokens)
    )
    equals = twins(search.situation)
    best: dict[object, Solved] = {}
    for arrangement in arrangements:
        solved = search.solve(arrangement) if is_canonical(arrangement, equals) else None
        before = best.get(kind(arrangement))
        if solved is not None and (before is None or solved.total_s < before.total_s):
            best[kind(arrangement)] = solved
    plans = [search.plan(solved) for solved in best.values()]
    return [Option(plan=plan, predicted=search.estimate(plan)) for plan in plans]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Slices of every layer on every device: by speed, and as if all were as fast as the first."""

    by_speed: Option
    equal: Option


def shares(proposal: Proposal) -> Shares | None:
    """None where one of the two does not fit."""
    first = proposal.cluster.devices[0].rates
    alike = replace(
        proposal.cluster,
        devices=tuple(replace(device, rates=first) for device in proposal.cluster.devices),
    )
    try:
        by_speed, equal = (_tensor(proposal, cluster) for cluster in (proposal.cluster, alike))
    except PartitionError:
        return None
    return Shares(by_speed=by_speed, equal=equal)


def _tensor(proposal: Proposal, cluster: ClusterSpec) -> Option:
    plan = choose(
        proposal.model,
        cluster,
        proposal.workload,
        parallel="tensor",
        chunk_tokens=proposal.chunk_tokens,
    ).plan
    return Option(plan=plan, predicted=_predicted(proposal, plan))


def _predicted(proposal: Proposal, plan: Plan) -> Estimate:
    return estimate(
        plan,
        proposal.model,
        proposal.cluster,
        proposal.workload,
        chunk_tokens=proposal.chunk_tokens,
    )
