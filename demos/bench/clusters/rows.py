"""What came out, as a row of predictions.csv, as lines for people, and part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from demos.bench.clusters.runs import ClusterRun, Run
from demos.bench.results import Conditions
from edge.planning.breakdown import Part, step_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cluster; the fields are the columns of predictions.csv.

    An error is predicted over actual, less 1. Times and gains are of whole answers: `times_solo`
    is the answer of the best single device over that of the chosen plan, `of_best` the answer of
    the best plan that was run over that of the chosen one, `shares_gain` equal slices over slices
    by speed. `machine_drift_percent` is by how much the machine itself took longer, at work that is
    not Edge's, when the plans answered than when the devices were measured, and `set_aside` how
    often answers were repeated for that. Empty where there is nothing to compare with.
    """

    date: str
    commit: str
    cluster: str
    devices: str
    shape: str
    tokens: str
    plan: str
    predicted_tokens_per_s: float
    tokens_per_s: float
    tokens_error_percent: float
    predicted_first_token_s: float
    first_token_s: float
    first_token_error_percent: float
    solo: str
    solo_predicted_tokens_per_s: float | None
    solo_tokens_per_s: float | None
    predicted_times_solo: float | None
    times_solo: float | None
    plans_run: int
    best: str
    of_best: float
    predicted_shares_gain: float | None
    shares_gain: float | None
    machine_drift_percent: float | None
    set_aside: int
    hardware: str
    versions: str

    @classmethod
    def of(cls, run: ClusterRun, conditions: Conditions) -> Row:
        chosen, solo, best, cluster = run.chosen, run.solo, run.best, run.cluster
        predicted, alone = chosen.predicted, None if solo is None else solo.predicted
        return cls(
            date=conditions.date,
            commit=conditions.commit,
            cluster=cluster.name,
            devices=", ".join(device.words for device in cluster.devices),
            shape=cluster.shape,
            tokens=cluster.work.words,
            plan=chosen.words,
            predicted_tokens_per_s=_short(predicted.tokens_per_s),
            tokens_per_s=_short(chosen.tokens_per_s),
            tokens_error_percent=error_percent(predicted.tokens_per_s, chosen.tokens_per_s),
            predicted_first_token_s=_short(predicted.first_token_s),
            first_token_s=_short(chosen.first_token_s),
            first_token_error_percent=error_percent(predicted.first_token_s, chosen.first_token_s),
            solo="" if solo is None else solo.words,
            solo_predicted_tokens_per_s=None if alone is None else _short(alone.tokens_per_s),
            solo_tokens_per_s=None if solo is None else _short(solo.tokens_per_s),
            predicted_times_solo=_gain(solo, chosen, predicted=True),
            times_solo=_gain(solo, chosen),
            plans_run=len(run.runs),
            best=best.words,
            of_best=round(best.actual_s / chosen.actual_s, 3),
            predicted_shares_gain=_gain(run.equal, run.by_speed, predicted=True),
            shares_gain=_gain(run.equal, run.by_speed),
            machine_drift_percent=round(100 * run.drift, 1),
            set_aside=run.set_aside,
            hardware=conditions.hardware,
            versions=conditions.versions,
        )


def error_percent(predicted: float, actual: float) -> float:
    """More than 0 where too much was predicted."""
    return round(100 * (predicted / actual - 1), 1)


def table(rows: Iterable[Row]) -> Table:
    """For people."""
    found = Table(title="predicted / actual", title_justify="left")
    for name in ("cluster", "plan"):
        found.add_column(name, overflow="fold")
    for name in ("tok/s", "error", "first token s", "error", "x solo", "of best", "x equal shares"):
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(
            f"{row.cluster} ({row.shape}, {row.tokens})",
            row.plan,
            f"{row.predicted_tokens_per_s:g} / {row.tokens_per_s:g}",
            f"{row.tokens_error_percent:+.0f} %",
            f"{row.predicted_first_token_s:g} / {row.first_token_s:g}",
            f"{row.first_token_error_percent:+.0f} %",
            _pair(row.predicted_times_solo, row.times_solo),
            f"{row.of_best:.2f} of {row.plans_run}",
            _pair(row.predicted_shares_gain, row.shares_gain),
        )
    return found


def parts(run: Run) -> list[Part]:
    """Where the time of a token went."""
    return step_parts(run.plan, run.predicted, run.times, 1 / run.tokens_per_s)


def to_json(run: ClusterRun, row: Row) -> dict[str, Any]:
    """The row, every plan that was run with its parts, and what was measured of the devices."""
    return {
        "row": dataclasses.asdict(row),
        "runs": [
            {
                "plan": each.words,
                "predicted": dataclasses.asdict(each.predicted),
                "answers": [dataclasses.asdict(answer) for answer in each.answers],
                "parts": [_part(part) for part in parts(each)],
                "times": [dataclasses.asdict(times) for times in each.times],
            }
            for each in run.runs
        ],
        "measured": dataclasses.asdict(run.proposal.cluster),
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "part": part.part,
        "predicted_ms": _short(1e3 * part.predicted_s),
        "actual_ms": _short(1e3 * part.actual_s),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _gain(slower: Run | None, faster: Run | None, *, predicted: bool = False) -> float | None:
    """How many times as fast the second answers."""
    if slower is None or faster is None:
        return None
    if predicted:
        return round(slower.predicted_s / faster.predicted_s, 3)
    return round(slower.actual_s / faster.actual_s, 3)


def _pair(predicted: float | None, actual: float | None) -> str:
    return "" if predicted is None or actual is None else f"{predicted:.2f} / {actual:.2f}"
