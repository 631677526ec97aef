"""`edge run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edge.api.model import Prompt
from edge.api.reply import Reply
from edge.cli.options import ClusterOptions, cluster_options, model_options, open_cluster
from edge.cli.reply_view import (
    adapt_option,
    show_parts,
    show_reply,
    tell_drift,
    tell_why_not_predicted,
)
from edge.coordinator.generation import GenerationRequest
from edge.planning.load_options import LoadOptions


def sampling_options(function: Any) -> Any:
    """How the answer is chosen."""
    for option in (
        click.option(
            "--seed",
            type=click.IntRange(0),
            help=("The same seed gives the same answer on any plan.  [default: a random one]"),
        ),
        click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help="End the answer before this text; may be repeated.",
        ),
        click.option(
            "--repetition-penalty",
            type=float,
            default=1.0,
            show_default=True,
            help="Above 1 makes used tokens less likely.",
        ),
        click.option(
            "--min-p",
            type=float,
            default=0.0,
            show_default=True,
            help="Keep tokens at least this likely, relative to the likeliest.",
        ),
        click.option(
            "--top-p",
            type=float,
            default=1.0,
            show_default=True,
            help="Keep the likeliest tokens up to this share.",
        ),
        click.option(
            "--top-k",
            type=int,
            default=0,
            show_default=True,
            help="Keep this many tokens; 0 keeps all.",
        ),
        click.option(
            "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."
        ),
        click.option(
            "-n",
            "--max-new-tokens",
            type=click.IntRange(1),
            default=128,
            show_default=True,
            help="Longest answer.",
        ),
    ):
        function = option(function)
    return function


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises RequestError for what no model can do, before one is loaded."""
    GenerationRequest.of((0,), **sampling)


@click.command("run", short_help="Answer one prompt.")
@model_options
@click.option(
    "-p", "--prompt", required=True, help="The text to go on from; - reads standard input."
)
@sampling_options
@adapt_option
@cluster_options
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt through the chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the whole reply as JSON instead of streaming."
)
@click.option(
    "--explain", is_flag=True, help="Show where the time went, beside what was predicted of it."
)
def command(
    model: Path,
    prompt: str,
    as_chat: bool,
    as_json: bool,
    options: LoadOptions,
    peers: ClusterOptions,
    adapt: bool,
    explain: bool,
    **sampling: Any,
) -> None:
    """Run MODEL (a folder with a Hugging Face checkpoint) on the cluster and stream its answer.

    \b
    Examples:
      edge run path/to/checkpoint -p "Why is the sky blue?"           on peers found by zeroconf
      edge run path/to/checkpoint -p "Hello" --local 2 --parallel tensor
      edge run path/to/checkpoint -p "Hello" --peer 192.168.1.7:5000 --peer 192.168.1.9:5000
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    check_sampling(sampling)
    with open_cluster(peers) as cluster:
        loaded = cluster.load_as(model, options)
        tell_why_not_predicted(loaded)
        text: Prompt = prompt
        if as_chat:
            text = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if as_json:
            reply = loaded.generate(text, **sampling)
            click.echo(json.dumps(_as_json(reply), ensure_ascii=False))
        else:
            reply = show_reply(loaded, text, **sampling)
        times = show_parts(loaded, reply) if explain else None
        drift = tell_drift(cluster, loaded, adapt=adapt, times=times)
        if drift is not None and adapt:
            loaded.close()
            cluster.measure_again(model, options, drift.devices)


def _as_json(reply: Reply) -> dict[str, Any]:
    return {
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "statistics": dict(reply.statistics),
    }
