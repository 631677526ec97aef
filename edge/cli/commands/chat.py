"""`edge chat`: a conversation."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edge.api.generation_options import GenerationOptions
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
    show_reply,
    tell_drift,
    tell_why_not_predicted,
)
from edge.errors import RequestError
from edge.planning.load_options import LoadOptions


@click.command("chat", short_help="Talk with a model in turns.")
@model_options()
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@generation_options
@adapt_option
@cluster_options
def command(
    model: Path,
    system: str | None,
    options: LoadOptions,
    peers: ClusterOptions,
    adapt: bool,
    generation: GenerationOptions,
) -> None:
    """Talk with MODEL in turns, by its own chat template.

    An empty line or Ctrl-D ends the conversation; /new starts a new one.

    \b
    Examples:
      edge chat path/to/checkpoint                                  on peers found by zeroconf
      edge chat path/to/checkpoint --local 2 --temperature 0.7
      edge chat path/to/checkpoint --system "Answer in one sentence." --peer 192.168.1.7:5000
    """
    with open_cluster(peers) as cluster:
        loaded = cluster.load(model, options)
        tell_why_not_predicted(loaded)
        start = [{"role": "system", "content": system}] if system else []
        # A template that cannot be used is told before anyone types.
        loaded.tokenizer.encode_chat([*start, {"role": "user", "content": "Hello"}])
        messages = list(start)
        measured_again: set[tuple[str, ...]] = set()
        while (line := _ask()) is not None:
            if line == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            try:
                reply = show_reply(loaded, loaded.tokenizer.encode_chat(messages), generation)
            except RequestError as error:
                # The conversation outgrew the context, or the template refuses it: say so, go on.
                click.echo(f"edge: {error}", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": reply.text})
            if (drift := drift_of(loaded)) is None:
                continue
            adapts = adapt and drift.devices not in measured_again
            tell_drift(cluster, loaded, model, options, drift, adapt=adapts)
            if adapts:
                measured_again.add(drift.devices)  # once: a second time would find the same
                loaded = cluster.load(model, options)


def _ask() -> str | None:
    """The next line of the user; None at the end."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False)
    line = sys.stdin.readline()
    return line.strip() or None
