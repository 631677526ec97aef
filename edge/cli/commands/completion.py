"""`edge completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_INSTALL = {
    "bash": 'eval "$(edge completion bash)"  # at the end of ~/.bashrc',
    "zsh": 'eval "$(edge completion zsh)"  # at the end of ~/.zshrc, after compinit',
    "fish": "edge completion fish > ~/.config/fish/completions/edge.fish",
}


@click.command("completion", short_help="Complete commands and options in a shell.")
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def command(shell: str) -> None:
    """Print what SHELL needs to complete edge's commands and options.

    \b
    Examples:
      edge completion bash                      what it prints begins with how to install it
      echo 'eval "$(edge completion bash)"' >> ~/.bashrc
      echo 'eval "$(edge completion zsh)"' >> ~/.zshrc
      edge completion fish > ~/.config/fish/completions/edge.fish
    """
    from edge.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(f"# To install: {_INSTALL[shell]}")
    click.echo(kind(cli, {}, "edge", "_EDGE_COMPLETE").source())
