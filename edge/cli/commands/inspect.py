"""`edge inspect`: a checkpoint's description, and the memory that it needs."""

from __future__ import annotations

import click

from edge.api.known_models import inspect
from edge.cli.inspect_view import show_inspection
from edge.cli.records import json_option, print_json


@click.command("inspect", short_help="Describe a checkpoint and the memory that it needs.")
@click.argument("model", type=click.Path(path_type=str))
@click.option("--template", is_flag=True, help="Print the text of its chat template, too.")
@json_option
def command(model: str, template: bool, as_json: bool) -> None:
    """Describe MODEL, a folder, a GGUF file or org/name: its layers, the formats of its weights on
    disk and in memory, the memory that it needs, its tokenizer.

    Only headers are read, so it is fast for any size; org/name is downloaded first. No peer is
    asked. For a checkpoint that Edge does not run, it shows the header and the reason.

    \b
    weights   in memory, packed for the kernels of a CPU, with the table of embeddings
    in all    with the KV cache of the default context, the buffers of a step, and a daemon
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
