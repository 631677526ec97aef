"""`edge completion`: shell scripts that complete commands and options."""

from __future__ import annotations

from pathlib import Path

import click
import platformdirs
from click.shell_completion import get_completion_class

from edge.cli.generated_files import write_own
from edge.errors import RequestError
from edge.host.home import under_home

_BY_HAND = {
    "bash": 'eval "$(edge completion bash)"  # at the end of ~/.bashrc',
    "zsh": 'eval "$(edge completion zsh)"  # at the end of ~/.zshrc, after compinit',
    "fish": "edge completion fish > ~/.config/fish/completions/edge.fish",
}
_WRITER = "edge completion --install"
_MARK = f"# Written by {_WRITER}, which writes it anew.\n"
_NEXT = {
    "bash": "New shells read it if the package bash-completion is installed;\n"
    "else add to ~/.bashrc: source {place}",
    "zsh": "Add to ~/.zshrc, before compinit, if it is not there: fpath+=({place.parent})",
    "fish": "New shells read it.",
}


@click.command("completion", short_help="Complete commands and options in a shell.")
@click.argument("shell", type=click.Choice(list(_BY_HAND)))
@click.option(
    "--install",
    is_flag=True,
    help="Write it to the shell's folder of completions, and print the path.",
)
def command(shell: str, install: bool) -> None:
    """Print or install SHELL's script that completes edge's commands and options.

    \b
    Examples:
      edge completion bash --install            for your user; prints the path
      edge completion zsh                       its first lines say how to install it
      echo 'eval "$(edge completion bash)"' >> ~/.bashrc
    """
    from edge.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    source = kind(cli, {}, "edge", "_EDGE_COMPLETE").source()
    if not install:
        click.echo(f"# To install: {_BY_HAND[shell]}")
        click.echo(source)
        return
    place = _place_for(shell)
    lines = f"{source.strip()}\n".splitlines(keepends=True)
    lines.insert(1 if lines[0].startswith("#compdef") else 0, _MARK)  # zsh reads the first line
    try:
        is_new = write_own(place, "".join(lines), mark=_MARK, writer=_WRITER)
    except OSError as error:
        raise RequestError(
            f"cannot write {place}: {error.strerror or error}",
            remedy="print it, without --install",
        ) from error
    click.echo(f"Wrote {place}" if is_new else f"{place} is as it should be")
    click.echo(_NEXT[shell].format(place=place))


def _place_for(shell: str) -> Path:
    """The path of a user's completions for a shell."""
    if shell == "bash":
        folder = under_home(lambda: platformdirs.user_data_dir("bash-completion"))
        return folder / "completions" / "edge"
    if shell == "fish":
        folder = under_home(lambda: platformdirs.user_config_dir("fish"))
        return folder / "completions" / "edge.fish"
    # zsh has no such folder; other programs use this one
    return under_home(Path.home) / ".zfunc" / "_edge"
