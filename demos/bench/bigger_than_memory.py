"""Models larger than memory: Edge, llama.cpp and Accelerate, in control groups of one limit.

python -m edge.demos.bench.bigger_than_memory --only W-1-2 --llama-python OTHER/bin/python --append

Needs root on Linux, for the groups. OTHER has llama-cpp-python, gguf, accelerate and transformers;
without it, Edge is measured alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

import edge
from edge.demos.bench import results
from edge.demos.bench.limited.cases import CASES, QUICK, Case
from edge.demos.bench.limited.runs import (
    PREFIX,
    Setting,
    run_alone,
    run_lending,
    run_pair,
    run_window,
)
from edge.demos.bench.limited.sides import SideError, gguf_of
from edge.demos.bench.options import append_option, folder_option
from edge.demos.control_groups import ControlGroup, remove_groups_of_the_dead
from edge.demos.shapes import checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE

RUNS = {
    "alone": run_alone,
    "two peers": run_pair,
    "sliding window": run_window,
    "lending": run_lending,
}


@click.command()
@click.option(
    "--only",
    "names",
    multiple=True,
    type=click.Choice([case.name for case in CASES]),
    metavar="NAME",
    help="Run this case; may be repeated.  [default: all but the quick one]",
)
@click.option("--quick", is_flag=True, help=f"Run {' and '.join(QUICK)} only.")
@click.option("--list", "is_list", is_flag=True, help="Show the cases and end.")
@click.option("--prepare", is_flag=True, help="Only make the checkpoints and GGUF files.")
@click.option("--llama-python", help="A Python with the other programs.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--block-size",
    type=int,
    default=128,
    show_default=True,
    help="Of int4-pure weights; 128 takes as many bytes as Q4_0 does.",
)
@folder_option
@append_option
def main(
    names: tuple[str, ...],
    quick: bool,
    is_list: bool,
    prepare: bool,
    folder: Path,
    append: bool,
    **options: Any,
) -> None:
    """Tokens per second, memory and reading, in budgets smaller than the weights."""
    wanted = {*names, *(QUICK if quick else ())}
    cases = [c for c in CASES if c.name in wanted or (not wanted and c.name not in QUICK)]
    if is_list:
        for case in cases:
            click.echo(f"{case.name:<10} {case.words}")
        return
    setting = Setting(folder=folder, **options)
    for case in cases:
        checkpoint(case.shape, folder)
        if setting.llama_python is not None and case.kind == "alone":
            gguf_of(case.shape, folder, python=setting.llama_python)
    if prepare:
        return
    os.environ[CACHE_VARIABLE] = str(setting.cache)
    try:
        remove_groups_of_the_dead(PREFIX)
        with ControlGroup(f"{PREFIX}-{os.getpid()}-try", memory_bytes=1 << 30, disk=folder):
            pass
    except OSError as error:
        raise click.ClickException(f"no control groups can be made here: {error}") from None
    failures = [failure for case in cases if (failure := _run(case, setting, append=append))]
    for failure in failures:
        click.echo(f"failed: {failure}")
    sys.exit(1 if failures else 0)


def _run(case: Case, setting: Setting, *, append: bool) -> str | None:
    """Shows the case's figures; a sentence if there are none."""
    click.echo(f"\n{case.name}: {case.words}")
    start_s = time.monotonic()
    try:
        metrics, said = RUNS[case.kind](case, setting)
    except (edge.EdgeError, SideError, OSError) as error:
        return f"{case.name}: {error}"
    form = f"int4-pure/{setting.block_size}" if case.dtype == "int4-pure" else case.dtype
    results.publish(
        metrics,
        question="bigger than memory, in one limit, in turn",
        variant=f"{case.name}: {form}, {setting.threads} threads; {said}",
        link="TCP over loopback" if case.kind == "two peers" else "none",
        model=described(case.shape),
        keep=append,
    )
    click.echo(f"{time.monotonic() - start_s:.0f} s")
    return None


if __name__ == "__main__":
    main()
