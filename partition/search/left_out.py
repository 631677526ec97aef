"""Why a plan does not use a device, in words, from the best plan that does use it."""

from dataclasses import dataclass

from edge.partition.cost.estimate import Estimate
from edge.partition.cost.terms import Kind, Term, milliseconds
from edge.partition.errors import size_in_words
from edge.partition.search.arrangements import with_device
from edge.partition.search.branch_and_bound import Search, Solved
from edge.partition.search.situation import Arrangement

_MOST_TRIED = 3
"""Places for the device that are solved, the most promising first, until it fits."""

_MESSAGES: dict[Kind, str] = {"reduce": "sums", "hop": "hops"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A device that the plan does not use, and why."""

    device: str
    """Its id."""
    name: str
    reason: str


def left_out(search: Search, arrangement: Arrangement, predicted: Estimate) -> tuple[LeftOut, ...]:
    """Every device that `arrangement` does not use, in the order of the cluster."""
    used = {index for group in arrangement for index in group}
    return tuple(
        LeftOut(
            device=device.id,
            name=device.name,
            reason=_reason(search, arrangement, predicted, index),
        )
        for index, device in enumerate(search.situation.devices)
        if index not in used
    )


def _reason(search: Search, arrangement: Arrangement, predicted: Estimate, index: int) -> str:
    best = _best_with(search, arrangement, index)
    if best is None and (unreachable := _unreachable(search, arrangement, index)):
        return f"it cannot reach {' or '.join(unreachable)}"
    if best is None:
        room = size_in_words(search.situation.devices[index].memory_bytes)
        return f"memory: no part of the model fits into its {room}"
    with_it = search.estimate(search.plan(best))
    workload = search.situation.workload
    it_s, without_s = with_it.total_s(workload), predicted.total_s(workload)
    answers = f"with it an answer would take {_seconds(it_s)} instead of {_seconds(without_s)}"
    if it_s < without_s:
        return f"too small a gain: {answers}"
    before_s, after_s = _messages_s(predicted), _messages_s(with_it)
    if after_s <= before_s or with_it.token_s - after_s >= predicted.token_s - before_s:
        return f"too slow to help: {answers}"
    if before_s:
        return (
            f"its link is too slow: with it the messages of each token would take"
            f" {milliseconds(after_s)} instead of {milliseconds(before_s)}"
        )
    slowest = max(_messages(with_it), key=lambda term: term.seconds)
    return (
        f"its link would add {slowest.count} {_MESSAGES[slowest.kind]} x"
        f" {milliseconds(slowest.seconds / slowest.count)} to each token"
    )


def _unreachable(search: Search, arrangement: Arrangement, index: int) -> list[str]:
    """Names of the devices in use that this device cannot reach."""
    situation = search.situation
    device = situation.devices[index]
    others = [situation.devices[other] for group in arrangement for other in group]
    return [other.name for other in others if not situation.network.is_linked(device.id, other.id)]


def _best_with(search: Search, arrangement: Arrangement, index: int) -> Solved | None:
    """The fastest plan that also uses this device; None when no part fits on it."""
    bounds = [(search.bound_s(each), each) for each in with_device(arrangement, index)]
    for bound_s, each in sorted(bounds)[:_MOST_TRIED]:
        if bound_s < float("inf"):
            solved = search.solve(each)
            if solved is not None:
                return solved
    return None


def _messages(estimate: Estimate) -> list[Term]:
    """The terms of messages between devices."""
    return [term for term in estimate.terms if term.kind in _MESSAGES]


def _messages_s(estimate: Estimate) -> float:
    return sum(term.seconds for term in _messages(estimate))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else milliseconds(seconds)
