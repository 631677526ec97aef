"""`edge top`: the live state of a server's model, until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import click
from rich.console import Console
from rich.live import Live

from edge.cli.top_view import line, screen
from edge.errors import NetworkError, RequestError
from edge.offload import read_file
from edge.protocol.fields import one_line

_USUAL_URL = "http://127.0.0.1:11435"
_MOST_BYTES = 8 << 20
_MOST_KEY_FILE_BYTES = 1 << 20
_TIMEOUT_S = 10.0

_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy for the Internet reaches no server of this machine or network."""


@click.command("top", short_help="Show the live state of a server's model.")
@click.argument("url", default=_USUAL_URL)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The server's keys, or one of them.",
)
@click.option("--model", help="One of several models that it serves; else the one used last.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between two looks.",
)
@click.option("--once", is_flag=True, help="Look once.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each look.")
def command(
    url: str,
    api_key_file: Path | None,
    model: str | None,
    every_s: float,
    once: bool,
    as_json: bool,
) -> None:
    """Show the plan behind URL, an `edge serve`, and where the time of each token goes.

    It is the server's page for terminals: tokens per second now, measured and predicted; memory and
    health of each device; answers under way; losses and returns. Outside of a terminal it prints a
    line for each state. Peers are asked only while it runs.

    \b
    Examples:
      edge top
      edge top http://attic:8000 --api-key-file keys.txt
      edge top --once --json        for scripts
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        raise RequestError(
            f"{url!r:.200} is not the address of a server", remedy=f"one is {_USUAL_URL}"
        )
    asked = "" if model is None else f"?{urlencode({'model': model})}"
    looks = _looks(f"{url.rstrip('/')}/api/cluster{asked}", _key(api_key_file), every_s, once=once)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file or another program gets all columns
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
        if console.is_terminal and not console.is_dumb_terminal and not as_json and not once:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for before, now in looks:
                    live.update(screen(before, now), refresh=True)
            return
        for before, now in looks:
            if as_json:
                click.echo(json.dumps(now))
            elif once:
                console.print(screen(before, now))
            else:
                click.echo(line(before, now))


def _looks(
    address: str, key: str | None, every_s: float, *, once: bool
) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any]]]:
    """The server's states, each with the previous one."""
    before = None
    while True:
        now = _look(address, key)
        try:
            line(before, now), screen(before, now)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise NetworkError(
                f"{address} does not answer like edge serve of this version",
                remedy="install the same version on both sides",
            ) from error
        yield before, now
        if once:
            return
        before = now
        time.sleep(every_s)


def _look(address: str, key: str | None) -> dict[str, Any]:
    asked = urllib.request.Request(address)  # noqa: S310  the scheme was checked
    if key is not None:
        asked.add_header("Authorization", f"Bearer {key}")
    try:
        with _directly.open(asked, timeout=_TIMEOUT_S) as answer:
            told = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            said = _sentence(error)
            remedy = "name the address of an edge serve"
            if error.code == 401:
                remedy = "give its key with --api-key-file"
        raise NetworkError(f"{address} answers {error.code} {said}", remedy=remedy) from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NetworkError(
            f"no edge serve at {address} ({reason})",
            remedy="start one with edge serve, or name its address",
        ) from error
    if not isinstance(told, dict):
        raise NetworkError(
            f"{address} does not answer like edge serve",
            remedy="name the address of an edge serve",
        )
    return told


def _sentence(refusal: urllib.error.HTTPError) -> str:
    """The server's error sentence, or HTTP's reason."""
    try:
        told = json.loads(refusal.read(_MOST_BYTES))
        return one_line(told["error"], limit=500)
    except (OSError, ValueError, KeyError, TypeError):
        return one_line(refusal.reason)


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        words = read_file(path, _MOST_KEY_FILE_BYTES).decode().split()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} cannot be read as keys: {error}", remedy="name a file with a key in it"
        ) from error
    if not words:
        raise RequestError(f"{path} has no key", remedy="name a file with a key in it")
    return words[0]
