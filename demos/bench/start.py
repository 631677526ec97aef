"""How long `edge run` takes from the command to the first token, and to its end, weights cached.

python -m edge.demos.bench.start --shape W --block-size 128

One local peer is started by the command itself, so two Python processes are in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click

from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.shapes import checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE


def start(command: list[str], cache: Path) -> tuple[float, float]:
    """Seconds to the first byte on standard output, and to the end of the command."""
    begin_s = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, CACHE_VARIABLE: str(cache)},
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_s = time.perf_counter() - begin_s
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return first_s, time.perf_counter() - begin_s


@click.command()
@shape_option()
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@folder_option
@append_option
def main(
    shape: str, block_size: int, threads: int, rounds: int, folder: Path, append: bool
) -> None:
    """The first round fills the caches and is not counted."""
    path = checkpoint(shape, folder)
    command = [sys.executable, "-m", "edge", "run", str(path), "-p", "hello", "-n", "8"]
    command += ["--local", "1", "--threads", str(threads), "--block-size", str(block_size)]
    command += ["--dtype", "int4-pure"]
    figures = Figures()
    for number in range(rounds + 1):
        first_s, end_s = start(command, folder / "cache")
        if number:
            figures.add("to the first token", "s", first_s)
            figures.add("to the end, 8 tokens", "s", end_s)
    results.publish(
        figures.metrics(),
        question="start of a cached model",
        variant=f"edge run --local 1, int4-pure/{block_size}, {threads} threads",
        link="TCP over loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
