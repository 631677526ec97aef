"""Drafts in the cost model (speculative decoding): how long they are, and what they gain.

A step that verifies a draft of k tokens has k + 1 rows. After Leviathan et al. (2023): where each
guess is right with chance p if those before it are, it gives 1 + p + ... + p^k tokens on average.
"""

from collections.abc import Callable
from dataclasses import dataclass

from edge.partition.cost.estimate import step_s
from edge.partition.plan.facts import ClusterSpec, ModelFacts, Workload
from edge.partition.plan.plan import Plan

_MARGIN = 1.1
"""By how much drafts in turn must be faster: each of these steps is an order of the coordinator."""


def draft_length(
    right: float,
    seconds: Callable[[int], float],
    most: int,
    *,
    again: int = 0,
    rewinds: bool = False,
    guess_s: float = 0.0,
) -> int:
    """The length, up to `most`, of the draft that gives the most tokens per second, of those that
    make the number of rows even.

    right: chance of a guess whose predecessors are right. seconds: of a step of so many rows.
    again: rows before it that are computed again. rewinds: after a wrong guess, the right rows are
    computed again. guess_s: time to make a guess.
    """
    shortest = 1 - again % 2
    best, most_per_s = shortest, 0.0
    expected, rows_again, row_s = 1.0, 0.0, 0.0
    if rewinds and most > 1:
        row_s = max(0.0, seconds(1 + most) - seconds(2)) / (most - 1)
    for length in range(max(shortest, most) + 1):
        if length:
            rows_again += right ** (length - 1) * (1 - right) * (again + length)
            expected += right**length
        if length % 2 == shortest:
            taken_s = seconds(again + 1 + length) + row_s * rows_again + length * guess_s
            if expected / taken_s > most_per_s:
                best, most_per_s = length, expected / taken_s
    return best


def most_in_turn(
    right: float,
    seconds: Callable[[int], float],
    shared: Callable[[int], float],
    *,
    length: int,
    most: int,
    rewinds: bool,
) -> int:
    """How many requests, up to `most`, are faster in turn, each with a draft of this length, than
    in one step that gives each of them a token; 0: a request alone is faster without a draft.

    right, seconds, rewinds: see `draft_length`. shared: seconds of one step of so many requests.
    """
    expected = sum(right**each for each in range(1 + length))
    taken_s = seconds(1 + length + (1 + length) % 2)
    if rewinds:  # a step of their own for rows behind which a guess was wrong
        taken_s += (1 - right**length) * seconds(2)
    fitting = 0
    while fitting < most and expected * shared(1 + fitting) > _MARGIN * (1 + fitting) * taken_s:
        fitting += 1
    return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessing:
    """What drafts gain on a plan."""

    right: float
    """Chance of a guess whose predecessors are right."""
    drafted: int
    """The length of a draft."""
    tokens_per_pass: float
    tokens_per_s: float
    """The rate of a request that is alone, while it decodes."""


def guessing(
    plan: Plan,
    model: ModelFacts,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    right: float,
    most: int,
    rewinds: bool,
) -> Guessing:
    """The gain of drafts up to `most` tokens. Raises PlanError where a device was not measured."""
    known: dict[int, float] = {}

    def seconds(rows: int) -> float:
        if rows not in known:
            known[rows] = step_s(plan, model, cluster, workload, rows=rows)
        return known[rows]

    length = draft_length(right, seconds, most, rewinds=rewinds)
    expected = sum(right**each for each in range(length + 1))
    taken_s = seconds(1 + length)
    if rewinds:  # in the next step, behind the rows of its own
        wrong = (right ** (each - 1) * (1 - right) * each for each in range(1, length + 1))
        taken_s += (seconds(1 + length) - seconds(2)) / max(1, length - 1) * sum(wrong)
    return Guessing(
        right=right,
        drafted=length,
        tokens_per_pass=expected,
        tokens_per_s=expected / taken_s,
    )
