"""The planner over thousands of made-up clusters: no simpler planner beats it, noise of
measurements costs no more than the noise, and small changes move no model.

The time of an answer grows by at most the factor that all measured times grow by. So a plan that is
chosen by measurements up to a part n too high or too low takes at most (1 + n)² of the best time,
beyond the gain for which a further device is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from edge.partition import (
    CapacityError,
    Choice,
    ClusterSpec,
    ModelFacts,
    Plan,
    UnderWay,
    Workload,
    check_fit,
    choose,
    estimate,
    join,
)
from edge.partition.cost.contention import shares_host
from edge.partition.losses import joining
from edge.partition.search.branch_and_bound import EXACT_DEVICES
from edge.partition.search.choose import LEAST_GAIN, LEAST_GAIN_ON_ONE_HOST
from tests.support.made_up_clusters import Situation, made_up, measured, rivals
from tests.support.slow_cases import repeats_are_slow

NEARLY_ONE = 1 + 1e-9

SMALL_CHANGE = 0.02

SHORT_OF_MEMORY = 0.02
"""Where memory is short, shares of a stage are not searched exactly: of 2,000 clusters one had a
plan of fewer devices that the search found in a form slower by 1.4 %."""

CORPUS = Path(__file__).parents[1] / "corpus" / "clusters.json"
"""Clusters for which the planner was once wrong, or is not exact: a failing one is added here."""


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    why: str
    model: ModelFacts
    cluster: ClusterSpec
    workload: Workload

    @property
    def situation(self) -> Situation:
        return self.model, self.cluster, self.workload


KEPT = msgspec.json.decode(CORPUS.read_bytes(), type=list[Kept])


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.why)
def test_clusters_that_are_kept(kept: Kept) -> None:
    check_rivals(kept.situation, 0)


def chosen(situation: Situation) -> Choice | None:
    """None where memory is short."""
    try:
        return choose(*situation)
    except CapacityError:
        return None


def seconds(plan: Plan, situation: Situation) -> float:
    return estimate(plan, *situation[:2], situation[2]).total_s(situation[2])


def tolerance(choice: Choice, situation: Situation) -> float:
    """What a further device must gain: more on one host."""
    (fastest, _), *_ = sorted(
        [(choice.plan, choice.predicted), *choice.runners_up],
        key=lambda each: seconds(each[0], situation),
    )
    devices = [situation[1].device(id) for id in fastest.devices]
    shared = any(shares_host(devices, device) for device in devices)
    return LEAST_GAIN_ON_ONE_HOST if shared else LEAST_GAIN


def check_rivals(situation: Situation, number: int) -> None:
    choice, others = chosen(situation), list(rivals(situation, number))
    if choice is None:
        assert not others, f"{others[0]} fits"
        return
    check_fit(choice.plan, *situation)
    taken_s, more = seconds(choice.plan, situation), 1 + tolerance(choice, situation)
    fastest_s = min([taken_s, *(seconds(plan, situation) for plan, _ in choice.runners_up)])
    assert taken_s <= fastest_s * more * NEARLY_ONE
    if choice.solo is not None:
        assert taken_s <= choice.solo.estimate.total_s(situation[2]) * NEARLY_ONE
    is_exact = len(situation[1].devices) <= EXACT_DEVICES
    for rival in others:
        rival_s = seconds(rival, situation)
        assert fastest_s <= rival_s * NEARLY_ONE, f"{rival} is faster than {choice.plan}"
        if len(rival.devices) < len(choice.plan.devices) and is_exact:
            enough_s = fastest_s * more / (1 + SHORT_OF_MEMORY)
            assert rival_s > enough_s, f"{rival} has fewer devices"


def check_noise(situation: Situation, number: int) -> None:
    model, cluster, workload = situation
    if (best := chosen(situation)) is None:
        return
    best_s = min(seconds(plan, situation) for plan in (best.plan, *(p for p, _ in best.runners_up)))
    for noise in (0.02, 0.1):
        seen = (model, measured(cluster, noise, number), workload)
        found = chosen(seen)
        assert found is not None
        most = best_s * (1 + noise) ** 2 * (1 + tolerance(found, seen))
        assert seconds(found.plan, situation) <= most * NEARLY_ONE


def check_steady(situation: Situation, number: int) -> None:
    """A model stays where the facts change a little, and does not go back after a real move."""
    model, cluster, workload = situation
    if (choice := chosen(situation)) is None:
        return
    none = UnderWay()
    nearly = measured(cluster, SMALL_CHANGE, number)
    assert join(choice.plan, model, nearly, workload, none).when == "stay"
    other = measured(cluster, 1.5, number)
    move = join(choice.plan, model, other, workload, none)
    if move.to is None or move.before is None or move.to.predicted is None:
        return
    before = estimate(choice.plan, model, other, workload)
    without = joining.HORIZON_S / before.token_s
    left_s = joining.HORIZON_S - move.pause_s - joining.SHIPPING_COSTS * move.ships_s
    gained = left_s / seconds_of_a_token(move.to.plan, (model, other, workload)) - without
    assert gained >= (joining.LEAST_GAIN - 1) * without / NEARLY_ONE
    for again in range(2):
        nearly = measured(other, SMALL_CHANGE, again)
        assert join(move.to.plan, model, nearly, workload, none).when == "stay"


def seconds_of_a_token(plan: Plan, situation: Situation) -> float:
    return estimate(plan, *situation[:2], situation[2]).token_s


Check = Callable[[Situation, int], None]


def blocks(
    check: Check, most_devices: int, first: int, last: int, size: int
) -> Iterator[tuple[Check, int, range]]:
    for start in range(first, last, size):
        yield check, most_devices, range(start, min(start + size, last))


@pytest.mark.parametrize(
    ("check", "most_devices", "numbers"),
    repeats_are_slow(
        [
            *blocks(check_rivals, 3, 0, 2000, 40),
            *blocks(check_rivals, 7, 3000, 3200, 3),  # not every arrangement is searched
            *blocks(check_noise, 3, 4000, 4600, 10),
            *blocks(check_steady, 3, 5000, 5300, 8),
        ],
        of=(0, 1),
    ),
)
def test_made_up_clusters(check: Check, most_devices: int, numbers: range) -> None:
    for number in numbers:
        check(made_up(number, most_devices=most_devices), number)
