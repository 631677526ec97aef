"""`edge bench`: how fast a model runs on the cluster, and what limits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edge.benchmark import Benchmark, run_benchmark
from edge.commands.options import cluster_options, model_options, open_cluster, read_plan
from edge.formats import Accuracy
from edge.memory import format_size


@click.command("bench", short_help="Measure a model's speed and what limits it.")
@model_options
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--warm-ups", type=click.IntRange(0), default=1, show_default=True)
@click.option(
    "--requests",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Also measure this many replies at once.",
)
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(
    model: Path,
    parallel: str,
    plan_file: Path | None,
    dtype: str,
    block_size: str,
    accuracy: Accuracy,
    context: int | None,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    warm_ups: int,
    requests: int,
    as_json: bool,
    **cluster: Any,
) -> None:
    """Measure MODEL on the cluster: tokens per second, time to the first, and where time goes.

    The same random prompt is answered several times with ends ignored, so token counts are exact.
    "of limit" compares a peer's compute with its memory rate, measured just before: each token has
    to read every weight once.

    \b
    Examples:
      edge bench path/to/checkpoint --local 1 --threads 2
      edge bench path/to/checkpoint --local 2 --threads 1 --parallel tensor --json
    """
    with open_cluster(**cluster) as opened:
        rates = opened.memory_rates()
        loaded = opened.load(
            model,
            dtype=dtype,
            plan=read_plan(plan_file, parallel),
            context_tokens=context or prompt_tokens + new_tokens,
            block_size=int(block_size),
            accuracy=accuracy,
            concurrency=requests,
        )
        measured = run_benchmark(
            loaded,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            warm_ups=warm_ups,
            requests=requests,
            memory_rates=rates,
            weight_bytes=dict(loaded.token_weight_bytes),
        )
    if as_json:
        click.echo(json.dumps(measured.to_json(), indent=2))
    else:
        _show(measured, title=f"{loaded.name}, {dtype} in blocks of {block_size}, {accuracy}")


def _show(measured: Benchmark, *, title: str) -> None:
    console = Console()
    speed = Table("", "p20", "p50", "p80", title=title)
    for name, spread, digits in (
        (f"decode {measured.new_tokens}, tok/s", measured.decode_tokens_per_s, 1),
        (f"decode {measured.requests} at once, tok/s", measured.batch_tokens_per_s, 1),
        (f"prefill {measured.prompt_tokens}, tok/s", measured.prefill_tokens_per_s, 1),
        ("first token, s", measured.first_token_s, 3),
    ):
        values = (spread.p20, spread.p50, spread.p80)
        speed.add_row(name, *(f"{value:.{digits}f}" for value in values))
    console.print(speed)
    peers = Table(
        "peer", "compute", "sum", "wait", "send", "sample", "weights", "of limit", "memory",
        title="each decoded token, ms",
    )  # fmt: skip
    for share in measured.peers:
        parts = (share.compute_s, share.reduce_s, share.receive_s, share.send_s, share.sample_s)
        peers.add_row(
            share.times.name,
            *(f"{1e3 * part:.2f}" for part in parts),
            format_size(share.weight_bytes),
            f"{share.bandwidth_share:.0%}",
            f"{format_size(share.times.resident_bytes)} "
            f"(peak {format_size(share.times.peak_bytes)})",
        )
    console.print(peers)
