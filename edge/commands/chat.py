"""`edge chat`: a conversation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from edge.commands.options import cluster_options, model_options, open_cluster, read_plan
from edge.commands.run import sampling_options, show_reply
from edge.errors import RequestError
from edge.formats import Accuracy


@click.command("chat", short_help="Talk with a model in turns.")
@model_options
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options
@cluster_options
def command(
    model: Path,
    system: str | None,
    parallel: str,
    plan_file: Path | None,
    dtype: str,
    block_size: str,
    accuracy: Accuracy,
    context: int | None,
    addresses: tuple[str, ...],
    local: int | None,
    memory: str | None,
    threads: int | None,
    cluster: str,
    interfaces: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Talk with MODEL in turns, by its own chat template.

    An empty line or Ctrl-D ends the conversation; /new starts a new one.

    \b
    Examples:
      edge chat path/to/checkpoint                                  on peers found by zeroconf
      edge chat path/to/checkpoint --local 2 --temperature 0.7
      edge chat path/to/checkpoint --system "Answer in one sentence." --peer 192.168.1.7:5000
    """
    with open_cluster(
        addresses=addresses, local=local, memory=memory, threads=threads, cluster=cluster,
        interfaces=interfaces,
    ) as opened:  # fmt: skip
        loaded = opened.load(
            model,
            dtype=dtype,
            plan=read_plan(plan_file, parallel),
            context_tokens=context,
            block_size=int(block_size),
            accuracy=accuracy,
        )
        start = [{"role": "system", "content": system}] if system else []
        # A template that cannot be used is told before anyone types.
        loaded.tokenizer.encode_chat([*start, {"role": "user", "content": "Hello"}])
        messages = list(start)
        while (line := _ask()) is not None:
            if line == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            try:
                reply = show_reply(loaded, loaded.tokenizer.encode_chat(messages), **sampling)
            except RequestError as error:
                # The conversation outgrew the context, or the template refuses it: say so, go on.
                click.echo(f"edge: {error}", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": reply.text})


def _ask() -> str | None:
    """The next line of the user; None at the end."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False)
    line = sys.stdin.readline()
    return line.strip() or None
