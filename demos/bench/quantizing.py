"""How long `edge quantize` takes, and where the time goes.

python -m edge.demos.bench.quantizing --shape W --peers 2

The caches are empty at first, so the peers are measured and the model is sent, as the first time a
user has it done.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.bench.shapes import checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE
from edge.progress import Progress

_PARTS = {
    "quantise": "rounding to int8 for it, and rounding",
    "observe": "writing a text and summing up",
}


@click.command()
@shape_option()
@click.option("--peers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each.")
@folder_option
@append_option
@click.option("--inner", is_flag=True, hidden=True)
def main(shape: str, peers: int, threads: int, folder: Path, append: bool, inner: bool) -> None:
    """Seconds in all, and those of each part."""
    path = checkpoint(shape, folder)
    if not inner:  # in a process whose caches are empty
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            command = [
                sys.executable,
                "-m",
                "edge.demos.bench.quantizing",
                *sys.argv[1:],
                "--inner",
            ]
            subprocess.run(["env", f"{CACHE_VARIABLE}={cache}", *command], check=True)
        return
    out = folder / f"{shape}-quantised"
    shutil.rmtree(out, ignore_errors=True)
    figures = Figures()
    phase, since_s = "start", time.perf_counter()
    begin_s = since_s
    spent_s: dict[str, float] = {}

    def on_progress(event: Progress) -> None:
        nonlocal phase, since_s
        now_s = time.perf_counter()
        spent_s[phase] = spent_s.get(phase, 0.0) + now_s - since_s
        phase, since_s = event.phase, now_s

    with edge.Cluster.local(peers, threads=threads) as cluster:
        made = cluster.quantize(path, out, progress=on_progress)
    figures.add("in all", "s", time.perf_counter() - begin_s)
    for name, seconds in spent_s.items():
        figures.add(_PARTS.get(name, name), "s", seconds)
    figures.add("bytes per weight", "B", made.bytes_per_weight)
    shutil.rmtree(out)
    results.publish(
        figures.metrics(),
        question="rounding a model by what it is given",
        variant=f"edge quantize, {peers} peers on one machine, {threads} threads each",
        link="TCP over loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
