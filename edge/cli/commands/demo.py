"""`edge demo`: the bundled demos."""

from __future__ import annotations

import click

from edge.errors import RequestError


@click.command("demo", short_help="List the bundled demos, or run one.")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Run the demo NAME, or list the demos. Each takes under a minute and checks itself.

    \b
    Examples:
      edge demo                 the list
      edge demo quickstart
    """
    from edge.demos import catalogue

    if name is None:
        for demo in catalogue.DEMOS:
            click.echo(f"{demo.name:<12} {demo.summary}")
        return
    for demo in catalogue.DEMOS:
        if demo.name == name:
            demo.run()
            return
    known = ", ".join(demo.name for demo in catalogue.DEMOS)
    raise RequestError(f"there is no demo {name!r}", remedy=f"there are {known}")
