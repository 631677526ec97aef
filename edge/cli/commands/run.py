"""`edge run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from edge.api.async_model import Prompt
from edge.api.generation_options import GenerationOptions
from edge.api.reply import Reply
from edge.cli.options import (
    ClusterOptions,
    cluster_options,
    generation_options,
    model_options,
    open_cluster,
)
from edge.cli.reply_view import (
    adapt_option,
    drift_of,
    show_parts,
    show_reply,
    tell_drift,
    tell_why_not_predicted,
)
from edge.planning.load_options import LoadOptions


@click.command("run", short_help="Answer one prompt.")
@model_options()
@click.option(
    "-p", "--prompt", required=True, help="The text to go on from; - reads standard input."
)
@generation_options
@adapt_option
@cluster_options
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt through the chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the whole reply as JSON instead of streaming."
)
@click.option(
    "--explain", is_flag=True, help="Show where the time went, and what was predicted of it."
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
    generation: GenerationOptions,
) -> None:
    """Run MODEL (a Hugging Face checkpoint's folder, or a GGUF file) and stream its answer.

    \b
    Examples:
      edge run path/to/checkpoint -p "Why is the sky blue?"           on peers found by zeroconf
      edge run path/to/checkpoint -p "Hello" --local 2 --parallel tensor
      edge run path/to/checkpoint -p "Hello" --peer 192.168.1.7:5000 --peer 192.168.1.9:5000
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    with open_cluster(peers) as cluster:
        loaded = cluster.load(model, options)
        tell_why_not_predicted(loaded)
        text: Prompt = prompt
        if as_chat:
            text = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if as_json:
            reply = loaded.generate(text, generation)
            click.echo(json.dumps(_as_json(reply), ensure_ascii=False))
        else:
            reply = show_reply(loaded, text, generation)
        times = show_parts(loaded, reply) if explain else None
        if (drift := drift_of(loaded, times)) is not None:
            tell_drift(cluster, loaded, model, options, drift, adapt=adapt)


def _as_json(reply: Reply) -> dict[str, Any]:
    return {
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "statistics": dict(reply.statistics),
    }
