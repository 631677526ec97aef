"""Peers of one machine: is what `auto`, tensor and pipeline are said to be what they are?

python -m edge.demos.bench.local_cluster [--append]

1 to 4 peers of one thread on this machine, three sizes of model. Every plan answers in turn with
the best single peer, in the same minutes. Two bars: what was said within 10 % for 90 % of the
cases, and `auto` never below 0.97 of the best peer alone. Nothing else may run meanwhile.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import get_args

import click

import edge
from edge.demos.bench import results
from edge.demos.bench.clusters.runs import ROUNDS, Report, measured_rows
from edge.demos.bench.options import folder_option
from edge.demos.shapes import SHAPES, checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE
from edge.partition import Parallel

LOCAL_CLUSTER = Path(__file__).with_name("local_cluster.csv")
LIMIT_S = 45 * 60.0
"""After which no further cluster is begun; a cluster takes about three minutes."""


@click.command()
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=("small", "M", "H")
)
@click.option("--peers", "counts", multiple=True, type=click.IntRange(1, 16), default=(1, 2, 3, 4))
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True)
@folder_option
@click.option("--append", is_flag=True, help="Add the rows to local_cluster.csv.")
def main(
    shapes: tuple[str, ...], counts: tuple[int, ...], rounds: int, folder: Path, append: bool
) -> None:
    """Hold the planner to its predictions on peers of this machine."""
    report, conditions = Report(LOCAL_CLUSTER if append else None), results.conditions()
    end_s = time.monotonic() + LIMIT_S
    made = {shape: checkpoint(shape, folder) for shape in shapes}
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        os.environ[CACHE_VARIABLE] = cache  # what was measured before is measured again
        for count in counts:
            for shape in shapes:
                if time.monotonic() > end_s:
                    report.console.print(f"not run for want of time: {count} peers, {shape}")
                    continue
                asked: tuple[Parallel, ...] = get_args(Parallel) if count > 1 else ("auto",)
                with edge.Cluster.local(count, threads=1) as cluster:
                    report.add(
                        measured_rows(
                            cluster,
                            made[shape],
                            asked,
                            name=f"{count} local",
                            shape=described(shape),
                            conditions=conditions,
                            rounds=rounds,
                        )
                    )
    report.end()


if __name__ == "__main__":
    main()
