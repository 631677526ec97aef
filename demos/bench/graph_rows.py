"""What was said of plans for graphs beside what came: rows, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

GRAPH_PREDICTIONS = Path(__file__).with_name("graph_predictions.csv")
WITHIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan on one cluster; the fields are the columns of the file.

    `said_over_was` is more than 1 where too much time was said. `times_alone` is the median over
    turns of what the best single device took over what the plan took: more than 1 is faster. Its
    best device is that of least latency.
    """

    date: str
    commit: str
    cluster: str
    graph: str
    asked: str
    plan: str
    said_latency_s: float
    latency_s_p20: float
    latency_s: float
    latency_s_p80: float
    latency_said_over_was: float
    latency_times_alone: float
    said_interval_s: float
    interval_s_p20: float
    interval_s: float
    interval_s_p80: float
    interval_said_over_was: float
    interval_times_alone: float
    hardware: str
    versions: str

    @property
    def are_within(self) -> tuple[bool, bool]:
        """The latency, and the interval."""
        both = self.latency_said_over_was, self.interval_said_over_was
        return abs(both[0] - 1) <= WITHIN, abs(both[1] - 1) <= WITHIN


def table(rows: Iterable[Row]) -> Table:
    """For people."""
    found = Table(
        "cluster", "graph", "asked", "plan", "latency ms", "said / was", "x alone", "interval ms",
        "said / was", "x alone", title="said / was",
    )  # fmt: skip
    for row in rows:
        latency, interval = ("" if each else " !" for each in row.are_within)
        found.add_row(
            *(row.cluster.partition(":")[0], row.graph, row.asked, row.plan),
            f"{1e3 * row.said_latency_s:.1f} / {1e3 * row.latency_s:.1f}",
            f"{row.latency_said_over_was:.2f}{latency}",
            f"{row.latency_times_alone:.2f}",
            f"{1e3 * row.said_interval_s:.1f} / {1e3 * row.interval_s:.1f}",
            f"{row.interval_said_over_was:.2f}{interval}",
            f"{row.interval_times_alone:.2f}",
        )
    return found


def summary(rows: Sequence[Row]) -> str:
    """How many are within, and the worst of what `auto` chose."""
    latencies, intervals = (sum(row.are_within[which] for row in rows) for which in range(2))
    chosen = {
        "latency": [row.latency_times_alone for row in rows if row.asked == "latency"],
        "throughput": [row.interval_times_alone for row in rows if row.asked == "throughput"],
    }
    least = ", ".join(f"{min(found):.2f} for {asked}" for asked, found in chosen.items() if found)
    return (
        f"within {WITHIN:.0%}: {latencies} of {len(rows)} latencies, {intervals} intervals; the "
        f"best device's time over that of the chosen plan, at least: {least}"
    )
