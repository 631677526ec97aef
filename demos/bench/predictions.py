"""Is the planner right? Emulated clusters, what was predicted of each, and what came.

python -m demos.bench.predictions --quick
python -m demos.bench.predictions --only twins --only two-to-one --json runs.json

Needs root on Linux: devices are daemons in namespaces of their own (see `clusters`). Of each
cluster the chosen plan, the single devices and some others, on small clusters all that fit, answer
in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console

import edge
from demos.bench import results
from demos.bench.clusters.bed import why_not
from demos.bench.clusters.rows import Row, parts, table, to_json
from demos.bench.clusters.runs import ClusterRun, run_cluster
from demos.bench.clusters.steadiness import Machine
from demos.bench.clusters.table import CLUSTERS, CORES, QUICK, EmulatedCluster
from demos.bench.options import folder_option
from demos.bench.shapes import checkpoint
from edge.host.cache_paths import CACHE_VARIABLE

PREDICTIONS = Path(__file__).with_name("predictions.csv")


@click.command()
@click.option(
    "--only",
    "names",
    multiple=True,
    type=click.Choice([cluster.name for cluster in CLUSTERS]),
    metavar="NAME",
    help="Run this cluster; may be repeated.  [default: all]",
)
@click.option("--quick", is_flag=True, help=f"Run {' and '.join(QUICK)} only.")
@click.option("--list", "is_list", is_flag=True, help="Show the clusters and end.")
@folder_option
@click.option("--append", is_flag=True, help="Add the rows to predictions.csv.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every run with its parts, and what was measured, to this file.",
)
def main(
    names: tuple[str, ...],
    quick: bool,
    is_list: bool,
    folder: Path,
    append: bool,
    json_file: Path | None,
) -> None:
    """Hold the planner to its predictions on emulated clusters."""
    wanted = {*names, *(QUICK if quick else ())}
    clusters = [cluster for cluster in CLUSTERS if not wanted or cluster.name in wanted]
    console = Console()
    if is_list:
        for cluster in clusters:
            _show_cluster(console, cluster)
        return
    reason = why_not()
    if reason is not None:
        raise click.ClickException(f"clusters cannot be emulated here: {reason}")
    os.environ[CACHE_VARIABLE] = str(folder / "clusters")
    conditions = results.conditions()
    machine = Machine(sorted(os.sched_getaffinity(0))[:CORES])
    rows: list[Row] = []
    written: list[dict[str, object]] = []
    failures: list[str] = []
    for cluster in clusters:
        _show_cluster(console, cluster)
        start_s = time.monotonic()
        try:
            made = checkpoint(cluster.shape, folder)
            run = run_cluster(cluster, made, folder / "clusters", machine)
        except (edge.EdgeError, OSError, ValueError, subprocess.CalledProcessError) as error:
            failures.append(f"{cluster.name}: {error}")
            console.print(f"  failed: {error}", markup=False)
            continue
        row = Row.of(run, conditions)
        rows.append(row)
        written.append(to_json(run, row))
        _show_runs(console, run)
        console.print(f"  {time.monotonic() - start_s:.0f} s")
        if append:
            results.append([row], PREDICTIONS)
        if json_file is not None:
            json_file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    console.print(table(rows))
    for failure in failures:
        console.print(f"failed: {failure}", markup=False)
    sys.exit(1 if failures else 0)


def _show_cluster(console: Console, cluster: EmulatedCluster) -> None:
    devices = ", ".join(device.words for device in cluster.devices)
    console.print(f"{cluster.name} ({cluster.shape}, {cluster.work.words} tokens): {devices}")


def _show_runs(console: Console, run: ClusterRun) -> None:
    """A line for each plan, and where the chosen one's time went."""
    for each in run.runs:
        console.print(
            f"  {each.words}: {each.predicted.tokens_per_s:.1f} predicted, {each.tokens_per_s:.1f} "
            f"tok/s; first token {each.predicted.first_token_s:.3f} predicted, "
            f"{each.first_token_s:.3f} s",
            markup=False,
            highlight=False,
        )
    listed = (
        f"{part.part} {1e3 * part.predicted_s:.4g} / {1e3 * part.actual_s:.4g} ms"
        for part in parts(run.chosen)
    )
    console.print(f"  {'; '.join(listed)}", markup=False, highlight=False)
    console.print(
        f"  the machine drifted by {100 * run.drift:+.1f} %, answers set aside: {run.set_aside}"
    )


if __name__ == "__main__":
    main()
