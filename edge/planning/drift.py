"""Whether replies were slower than predicted, and which part of a step was. Pure.

A prediction is a sum of terms, and peers count the time of each part. The part that exceeds its
prediction by most is reported, with the devices to measure again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge.partition import Estimate, Plan
from edge.planning.breakdown import PartKind, step_parts
from edge.protocol.step_times import PeerTimes

SLOWER_BY = 1.25
"""Ratio of actual to predicted time from which a reply counts as slow. Smaller differences come
from other programs on the devices."""

LEAST_EXCESS_S = 0.5
"""Seconds lost over all replies from which drift is reported. Less may be a single delay."""

DriftKind = Literal["prompt"] | PartKind

_BUSY = "something else keeps it busy, or it has slowed down since it was measured"

_WORDS: dict[PartKind, tuple[str, str]] = {
    "compute": ("computing on {}", _BUSY),
    "load": (
        "waiting for layers that are read for each token on {}",
        "a disk is slower than when it was measured, or others read from it, too",
    ),
    "sums": (
        "summing over {}",
        "the network between them is slower than when it was measured, or something "
        "keeps the devices from running at the same time",
    ),
    "sample": ("choosing tokens on {}", _BUSY),
    "messages": (
        "sending between the stages",
        "the network between them is slower than when it was measured",
    ),
}
"""For each part: its description (with the devices) and the probable cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAnswer:
    """One finished reply that ran alone, and the estimate for its lengths."""

    new_tokens: int
    first_token_s: float
    decode_s: float
    """From the first to the last token."""
    predicted: Estimate

    @property
    def predicted_s(self) -> float:
        return self.predicted.first_token_s + self.predicted_decode_s

    @property
    def predicted_decode_s(self) -> float:
        return (self.new_tokens - 1) * self.predicted.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What made replies slower than predicted."""

    kind: DriftKind
    slower: float
    """Actual time over predicted time, of whole replies."""
    devices: tuple[str, ...]
    """Ids of the devices whose rates, or whose links, should be measured again."""
    message: str
    """One sentence with the cause and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    kind: DriftKind
    devices: tuple[str, ...]
    what: str
    why: str
    actual_s: float
    predicted_s: float
    times: float
    """How often it happened."""

    @property
    def lost_s(self) -> float:
        return (self.actual_s - self.predicted_s) * self.times


def find_drift(
    answers: Sequence[FinishedAnswer],
    times: Sequence[PeerTimes],
    plan: Plan,
    names: Mapping[str, str],
) -> Drift | None:
    """The drift of these replies; None while they are about as fast as predicted.

    times: the peers' counters over exactly these replies. names: the devices' names by id.
    """
    actual_s = sum(each.first_token_s + each.decode_s for each in answers)
    predicted_s = sum(each.predicted_s for each in answers)
    if actual_s - predicted_s < LEAST_EXCESS_S or actual_s <= SLOWER_BY * predicted_s:
        return None
    worst = max(_excesses(answers, times, plan, names), key=lambda excess: excess.lost_s)
    per = "" if worst.kind == "prompt" else " a token"
    slower = actual_s / predicted_s
    return Drift(
        kind=worst.kind,
        slower=slower,
        devices=worst.devices,
        message=(
            f"{slower:.1f} times as slow as predicted: {worst.what} took "
            f"{_seconds(worst.actual_s)}{per} instead of {_seconds(worst.predicted_s)}; {worst.why}"
        ),
    )


def _excesses(
    answers: Sequence[FinishedAnswer],
    times: Sequence[PeerTimes],
    plan: Plan,
    names: Mapping[str, str],
) -> list[_Excess]:
    """Every part that peers can measure, with its actual and predicted time."""
    found = [
        _Excess(
            kind="prompt",
            devices=plan.devices,
            what="reading the prompt",
            why="the devices or their network have slowed down since they were measured",
            actual_s=sum(each.first_token_s for each in answers) / len(answers),
            predicted_s=sum(each.predicted.first_token_s for each in answers) / len(answers),
            times=len(answers),
        )
    ]
    decoded = sum(each.new_tokens - 1 for each in answers)
    if not decoded:
        return found
    parts = step_parts(
        plan,
        [((each.new_tokens - 1) / decoded, each.predicted) for each in answers],
        times,
        sum(each.decode_s for each in answers) / decoded,
    )
    for part in parts:
        if part.kind == "messages" and len(plan.stages) == 1:
            continue  # the caller's own time, which no new measurement would show
        what, why = _WORDS[part.kind]
        found.append(
            _Excess(
                kind=part.kind,
                devices=part.devices,
                what=what.format(" and ".join(names[device] for device in part.devices)),
                why=why,
                actual_s=part.actual_s,
                predicted_s=part.predicted_s,
                times=decoded,
            )
        )
    return found


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
