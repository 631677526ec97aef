"""`edge inspect`: what a checkpoint is, and what it would take."""

from __future__ import annotations

import click

from edge.api.known_models import inspect
from edge.cli.inspect_view import show_inspection
from edge.cli.records import json_option, print_json


@click.command("inspect", short_help="Show what a checkpoint is, and what it would take.")
@click.argument("model", type=click.Path(path_type=str))
@click.option("--template", is_flag=True, help="Print the text of its chat template, too.")
@json_option
def command(model: str, template: bool, as_json: bool) -> None:
    """Show what MODEL is, a folder, a GGUF file or org/name: its layers, what its weights are
    stored in, what Edge would hold them in, the memory that takes, its tokenizer.

    Only headers are read, so that it takes a moment however large the model is; org/name is fetched
    first. No peer is needed, and none is asked. Of a checkpoint that Edge does not run, it shows
    what the header says, and why it does not run.

    \b
    weights   in memory, packed for the kernels of a CPU, with the table of embeddings
    in all    with keys and values of a usual context, what a step computes with, and a daemon
    fits      whether this machine has that much for a daemon now

    \b
    Examples:
      edge inspect path/to/checkpoint
      edge inspect model.gguf --template
      edge inspect model.gguf --json
    """
    found = inspect(model)
    if as_json:
        print_json(found.to_json(template=template))
    else:
        show_inspection(found, given=str(model), template=template)
