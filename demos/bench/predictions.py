"""Is the planner right? Pinned peers with networks between them, what was said and what came.

python -m edge.demos.bench.predictions --list
python -m edge.demos.bench.predictions --only two-gigabit --append

Needs root on Linux: devices are daemons in namespaces of their own (see `clusters`). Peers of one
machine without any of that are in `local_cluster`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

import edge
from edge.demos.bench import results
from edge.demos.bench.clusters.bed import open_bed, why_not
from edge.demos.bench.clusters.runs import Report, Row, measured_rows
from edge.demos.bench.clusters.table import CASES, Case
from edge.demos.bench.options import folder_option
from edge.demos.shapes import checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE

PREDICTIONS = Path(__file__).with_name("predictions.csv")


@click.command()
@click.option(
    "--only",
    "names",
    multiple=True,
    type=click.Choice([case.name for case in CASES]),
    metavar="NAME",
    help="Run this case; may be repeated.  [default: all]",
)
@click.option("--list", "is_list", is_flag=True, help="Show the cases and end.")
@folder_option
@click.option("--append", is_flag=True, help="Add the rows to predictions.csv.")
def main(names: tuple[str, ...], is_list: bool, folder: Path, append: bool) -> None:
    """Hold the planner to its predictions on pinned peers."""
    report = Report(PREDICTIONS if append else None)
    cases = [case for case in CASES if not names or case.name in names]
    if is_list:
        for case in cases:
            report.console.print(f"{case.name} ({case.shape}): {_devices(case)}", highlight=False)
        return
    reason = why_not()
    if reason is not None:
        raise click.ClickException(f"no pinned peers here: {reason}")
    conditions = results.conditions()
    failures: list[str] = []
    for case in cases:
        try:
            report.add(_run(case, folder, conditions))
        except (edge.EdgeError, OSError, ValueError, subprocess.CalledProcessError) as error:
            failures.append(f"{case.name}: {error}")
    report.end()
    for failure in failures:
        report.console.print(f"failed: {failure}", markup=False)
    sys.exit(1 if failures else 0)


def _run(case: Case, folder: Path, conditions: results.Conditions) -> list[Row]:
    made = checkpoint(case.shape, folder)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        os.environ[CACHE_VARIABLE] = cache  # what was measured before is measured again
        with (
            open_bed(case.devices, Path(cache)) as addresses,
            edge.Cluster.connect(addresses) as cluster,
        ):
            return measured_rows(
                cluster,
                made,
                case.asked,
                name=f"{case.name}: {_devices(case)}",
                shape=described(case.shape),
                conditions=conditions,
            )


def _devices(case: Case) -> str:
    return ", ".join(device.words for device in case.devices)


if __name__ == "__main__":
    main()
