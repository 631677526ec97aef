"""`edge keep`: computes a document once, for answers that begin with it."""

from __future__ import annotations

from pathlib import Path

import click

from edge.answers.documents import MOST_DOCUMENT_BYTES, check_document
from edge.cli.options import ClusterOptions, cluster_options, model_options, open_cluster
from edge.errors import RequestError
from edge.planning.load_options import LoadOptions


@click.command("keep", short_help="Keep a document that answers begin with.")
@model_options()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", metavar="NAME", help="[default: the file's name without its ending]")
@cluster_options
def command(
    model: str, file: Path, name: str | None, options: LoadOptions, peers: ClusterOptions
) -> None:
    """Compute the text of FILE with MODEL, and keep it for answers that begin with it.

    The text stays on this device, and its keys and values on the peers that keep prefixes on disk:
    answers with it begin as soon as without it. Templates that write today's date before the
    system message make it be computed again each day.

    \b
    Examples:
      edge keep org/name handbook.txt
      edge run org/name --with handbook -p "How many days of leave are there?"
      edge chat org/name --with handbook
      edge cache documents                        list kept documents
      edge cache drop handbook
    """
    name = file.stem if name is None else name
    text = _read(file)
    check_document(name, text)
    with open_cluster(peers, options, model=model) as cluster:
        kept = cluster.load(model, options).keep(name, text)
    click.echo(f"{kept.name} is kept: {kept.tokens} tokens. Use it with: --with {kept.name}")


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_DOCUMENT_BYTES + 1)
        return content.decode()
    except OSError as error:
        raise RequestError(
            f"{file} cannot be read: {error.strerror}", remedy="give a file that you may read"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is no text in UTF-8", remedy="convert it first") from error
