"""`edge serve`: a model for clients that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import itertools
import json
import logging
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import click
import uvicorn

from edge.api.async_cluster import AsyncCluster
from edge.api.async_model import AsyncModel
from edge.api.hub_download import check_model
from edge.api.kept_documents import kept_documents
from edge.cli.field_options import given_options
from edge.cli.logs import LogOptions, set_up_logging
from edge.cli.options import (
    ClusterOptions,
    cluster_options,
    model_options,
    preferring_one,
    read_plan,
    way_to,
)
from edge.cli.services.managers import own_manager
from edge.cli.services.service import Service, install_service, server_task
from edge.concurrency.blocking import run_blocking
from edge.errors import RequestError
from edge.partition import Parallel, Plan
from edge.planning.load_options import LoadOptions
from edge.planning.proposal import Proposal
from edge.server.app import MOST_ANSWERS, Server, Speech
from edge.server.connections import WebServer, allow_connections, most_connections, web_config
from edge.server.guard import Rules
from edge.server.keys import read_keys
from edge.server.model_pool import ModelPool
from edge.server.pictures import Fetch, fetch_picture
from edge.server.previews import Previews
from edge.system.signals import HANGUP, no_longer_on_signal, on_signal, run_in_loop
from edge.weights.hub_cache import name_of_file
from edge.weights.pooling import Pooling

_log = logging.getLogger(__name__)

_DRAIN_S = 30.0
"""Seconds for answers under way when the server ends."""


class _Remembers(click.Command):
    """A command that remembers its arguments, for the systemd unit."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[__name__] = tuple(args)
        return super().parse_args(context, args)


@click.command("serve", cls=_Remembers, short_help="Serve a model over HTTP.")
@model_options(concurrency=True, defaults={"concurrency": 4})
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=11435,
    show_default=True,
    help="0 takes a free one.",
)
@click.argument("further", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--name", metavar="NAME", help="What clients call the first model.  [default: its own name]"
)
@click.option(
    "--alias",
    "aliases",
    metavar="NAME",
    multiple=True,
    help="Another name of the first model, for clients that ask for one of their own; may be "
    "repeated.",
)
@click.option(
    "--cors-origin",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    help="Let pages of this origin, such as https://chat.example, use the server; may "
    "be repeated.  [default: none]",
)
@click.option(
    "--plan-of",
    "plans",
    metavar="NAME=FILE",
    multiple=True,
    help="A plan by hand for the model of that name, like --plan for one model; may be repeated.",
)
@click.option(
    "--keep-alive",
    "keep_alive_s",
    metavar="SECONDS",
    type=click.FloatRange(0, 1e9),
    help="Time for which an idle model stays loaded.  [default: until another needs its room]",
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The clients' keys, one a line, with their limits. Read again at SIGHUP. Needed to "
    "listen on other addresses than this machine's own.",
)
@click.option(
    "--pooling",
    type=click.Choice(get_args(Pooling)),
    help="What an embedding is of its text's hidden states: their mean, or the last one.  "
    "[default: as the model's folder says, else the mean]",
)
@click.option(
    "--with",
    "documents",
    metavar="NAME",
    multiple=True,
    help="A document of edge keep that clients may begin with, as context; may be repeated.",
)
@click.option(
    "--fetch-images",
    is_flag=True,
    help="Download images that requests give by http or https, from the public internet alone.",
)
@click.option(
    "--speech",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with an ONNX export of Whisper, for /v1/audio/transcriptions.",
)
@click.option(
    "--max-answers",
    type=click.IntRange(1),
    default=MOST_ANSWERS,
    show_default=True,
    help="Most answers under way or waiting; further requests are told to retry later.",
)
@cluster_options
@given_options("logs", LogOptions)
@click.option(
    "--install",
    "place",
    type=click.Choice(["user", "system", "print"]),
    help="Write a service with all these options instead of serving: user serves while you "
    "are logged in, system from boot on; or print it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when ready.")
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    further: tuple[str, ...],
    plans: tuple[str, ...],
    keep_alive_s: float | None,
    host: str,
    port: int,
    name: str | None,
    aliases: tuple[str, ...],
    origins: tuple[str, ...],
    api_key_file: Path | None,
    pooling: Pooling | None,
    documents: tuple[str, ...],
    fetch_images: bool,
    speech: Path | None,
    max_answers: int,
    options: LoadOptions,
    peers: ClusterOptions,
    logs: LogOptions,
    place: str | None,
    as_json: bool,
) -> None:
    """Serve MODEL over HTTP to clients of the OpenAI, Anthropic or Ollama API.

    Of several models, each a MODEL or NAME=MODEL, the first is loaded at once and the others when a
    request names them. A model that does not fit beside the others replaces idle ones.

    Concurrent requests are batched; --concurrency sets the number that memory is kept for. Earlier
    turns of a conversation are found in the prefix cache. In a browser, the server's address is a
    page with a chat and a view of the cluster.

    \b
    Examples:
      edge serve path/to/checkpoint --local 1
      edge serve org/name --port 8000
      edge serve small=path/to/checkpoint org/name --keep-alive 600
      edge serve path/to/checkpoint --host 0.0.0.0 --api-key-file keys.txt
      edge serve path/to/checkpoint --port 8000 --install user
      edge serve path/to/checkpoint --speech whisper-tiny-onnx
      curl http://127.0.0.1:11435/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    if logs != LogOptions():
        set_up_logging(logs)
    if further:
        check_for_several(options)
    models = with_plans(offered((model, *further), name), plans, options.plan)
    keys = () if api_key_file is None else read_keys(api_key_file)
    is_own = is_loopback(host)
    if not is_own and not keys:
        raise RequestError(
            f"on {host} anybody who reaches this machine could use the model",
            remedy="give --api-key-file, or listen on 127.0.0.1",
        )
    if place is not None:
        for line in _installed(context.meta[__name__], place):
            click.echo(line)
        return
    check_aliases(aliases, [each.name for each in models if each.name])
    peers = preferring_one(peers, _largest(models, options))
    listening = listen(host, port)
    with contextlib.closing(listening):
        rules = Rules(
            keys=keys, hosts=("localhost",) if is_own else (), origins=checked_origins(origins)
        )
        run_in_loop(
            serve(
                models,
                options,
                peers,
                listening,
                aliases=aliases,
                keep_alive_s=keep_alive_s,
                rules=rules,
                key_file=api_key_file,
                max_answers=max_answers,
                pooling=pooling,
                documents=dict(zip(documents, kept_documents().texts(documents), strict=True)),
                fetch=fetch_picture if fetch_images else None,
                speech=None if speech is None else speech.resolve(),
                as_json=as_json,
            )
        )


def _installed(typed: Sequence[str], place: str) -> list[str]:
    """Lines about the service's file, or the file itself. Raises RequestError if it cannot be
    written."""
    option = "--install"
    kept = [
        each
        for before, each in itertools.pairwise(("", *typed))
        if before != option and each.partition("=")[0] != option
    ]
    service = Service.of_this_process(server_task(kept, Path.cwd()), is_system=place == "system")
    if place == "print":
        return own_manager().text(service).splitlines()
    return install_service(own_manager(), service)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A model that is served."""

    place: str
    name: str | None = None
    """Its name for clients; None: the model's own."""
    plan: Parallel | Plan = "auto"


def offered(models: Sequence[str], first: str | None) -> list[Offered]:
    """Parse models given as MODEL or NAME=MODEL. first: the name of the first one by --name.

    Raises RequestError for two models of one name.
    """
    found: list[Offered] = []
    for index, each in enumerate(models):
        name, equals, place = each.partition("=")
        if not equals or not name or "/" in name or Path(each).exists():
            is_here = Path(each).exists()
            # The first model is loaded at once, and has its own name then.
            name, place = (
                ("" if not index else name_of_file(Path(each).name) if is_here else each),
                each,
            )
        if first is not None and not index:
            name = first
        is_taken = name in {other.name for other in found} or name == "default"
        if is_taken or not place or name != name_of_file(name):
            raise RequestError(_cannot_be_called(each, name))
        found.append(Offered(name=name or None, place=place))
    return found


def with_plans(
    models: Sequence[Offered], plans: Sequence[str], usual: Parallel | Plan
) -> list[Offered]:
    """The models with their manual plans, of NAME=FILE each; others get `usual`.

    Raises RequestError for an unknown name, and the errors of `read_plan`.
    """
    files: dict[str, Path] = {}
    for each in plans:
        name, _, file = each.partition("=")
        known = [model.name for model in models if model.name]
        if name not in known or not file or name in files:
            named = ", ".join(map(repr, known)) or "none: give NAME=MODEL"
            raise RequestError(
                f"--plan-of {each!r:.200}: it must be NAME=FILE, once for a model",
                remedy=f"models that were given names here: {named}",
            )
        files[name] = Path(file)
    return [
        replace(model, plan=read_plan(files[model.name], "auto") if model.name in files else usual)
        for model in models
    ]


def check_aliases(aliases: Sequence[str], names: Sequence[str]) -> None:
    """Raises RequestError for an alias that is taken. names: of the models."""
    taken = {*names, "default", ""}
    for each in aliases:
        if each in taken:
            raise RequestError(
                f"--alias {each!r:.200} is the name of a model already",
                remedy="give each alias once, with a name that no model has",
            )
        taken.add(each)


def checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers write them. Raises RequestError for an invalid one."""
    for each in origins:
        if re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s*]+", each) is None:
            raise RequestError(
                f"--cors-origin {each!r:.200}: it must be the beginning of an address, without a "
                "path: https://chat.example, or http://localhost:3000"
            )
    return tuple(each.lower() for each in origins)


def _cannot_be_called(model: str, name: str) -> str:
    return (
        f"{model!r} cannot be called {name!r} here: each model needs a printable name of its own, "
        "other than default; give it as NAME=MODEL"
    )


def check_for_several(options: LoadOptions) -> None:
    """Raises RequestError for options that fit a single model only."""
    of_one = {
        "--plan": (isinstance(options.plan, Plan), "give --plan-of NAME=FILE"),
        "--lora": (bool(options.lora), "serve that model alone"),
    }
    for option, (is_given, instead) in of_one.items():
        if is_given:
            raise RequestError(
                f"{option} is for one model, and all models of a server have the same options",
                remedy=f"leave it out, or {instead}",
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises RequestError if the address cannot be used."""
    try:
        (family, *_, address), *_others = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            remedy="choose another --port, or --host",
        ) from error


async def serve(
    models: Sequence[Offered],
    options: LoadOptions,
    peers: ClusterOptions,
    listening: socket.socket,
    *,
    aliases: Sequence[str],
    keep_alive_s: float | None,
    rules: Rules,
    key_file: Path | None,
    max_answers: int,
    pooling: Pooling | None,
    documents: Mapping[str, str],
    fetch: Fetch | None,
    speech: Path | None,
    as_json: bool,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish answers under way and refuse new ones.

    key_file: the source of the rules' keys; None: there are none. documents: texts by name.
    fetch: downloads images. speech: a folder of an export.
    """
    for each in models:
        await run_blocking(partial(check_model, each.place))
    async with _opened(peers, _largest(models, options)) as cluster:
        plan = options.plan if isinstance(options.plan, str) else "auto"
        planned = replace(options, plan=plan)

        async def propose(place: str | Path, changes: Sequence[str]) -> Proposal:
            return await cluster.propose(place, planned, changes=changes, measure="nothing")

        loaded = await cluster.load(models[0].place, replace(options, plan=models[0].plan))
        first = models[0].name or loaded.name
        places = {first: models[0].place}
        plans = {first: models[0].plan}
        for each in models[1:]:
            if (called := each.name or first) in places:
                raise RequestError(_cannot_be_called(each.place, called))
            places[called], plans[called] = each.place, each.plan

        async def load(name: str, whole: bool) -> AsyncModel:
            stream = "off" if whole and options.stream == "auto" else options.stream
            chosen = replace(options, stream=stream, plan=plans[name])
            return await cluster.load(places[name], chosen)

        check_aliases(aliases, list(places))
        pool = ModelPool(
            places, load, keep_alive_s=keep_alive_s, loaded={first: loaded}, aliases=aliases
        )
        async with pool.using(first):
            pass  # it counts as idle from now on
        hears = None
        if speech is not None:
            hears = Speech(name=speech.name, export=await cluster.load_graphs(speech))
        server = Server(
            pool,
            rules=rules,
            most_answers=max_answers,
            pooling=pooling,
            documents=documents,
            fetch=fetch,
            speech=hears,
            previews=Previews(places, propose),
            candidates=lambda: cluster.peers,
        )
        connections = allow_connections(most_connections(max_answers))
        config = web_config(server.app, most_connections=connections)
        config.timeout_graceful_shutdown = round(_DRAIN_S)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if as_json:
            click.echo(json.dumps({"url": url, "model": first, "models": list(places)}))
        else:
            click.echo(_described(loaded))
            if len(places) > 1:
                click.echo(f"When they are asked for: {', '.join(list(places)[1:])}")
            click.echo(f"OpenAI: {url}/v1   Anthropic and Ollama: {url}   metrics: {url}/metrics")
            click.echo(f"Chat, and what runs where: {url}")
        try:
            await _Drained(config, server, key_file).serve(sockets=[listening])
        finally:
            await pool.aclose()


def _described(model: AsyncModel) -> str:
    devices = ", ".join(model.peers[each].name for each in model.plan.devices)
    if copies := model.copies:
        where = "; ".join(" and ".join(each.devices) for each in copies)
        devices = f"{where} ({len(copies)} cop{'ies' if len(copies) > 1 else 'y'})"
    return f"{model.name} on {devices}, context {model.context_tokens} tokens"


class _Drained(WebServer):
    """A server that drains after the first signal, and ends at once at the second."""

    def __init__(self, config: uvicorn.Config, server: Server, key_file: Path | None) -> None:
        super().__init__(config)
        self._server = server
        self._key_file = key_file

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals here: uvicorn would raise them again before the peers have been told."""
        loop = asyncio.get_running_loop()
        signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
        for each in signals:
            on_signal(loop, each, self._end)
        if self._key_file is not None and HANGUP is not None:
            on_signal(loop, HANGUP, functools.partial(self._reload, self._key_file))
            signals = (*signals, HANGUP)
        try:
            yield
        finally:
            for each in signals:
                no_longer_on_signal(loop, each)

    def _reload(self, key_file: Path) -> None:
        """Read the keys again. Removed keys are refused; their requests under way are finished."""
        guard = self._server.guard
        try:
            guard.rules = replace(guard.rules, keys=read_keys(key_file))
        except RequestError as error:
            _log.warning("the keys are not changed: %s", error)
        else:
            _log.info("%d keys were read from %s", len(guard.rules.keys), key_file)

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self._server.gate.is_draining = self.should_exit = True


def _largest(models: Sequence[Offered], options: LoadOptions) -> LoadOptions:
    """The options with the manual plan of most devices, if any: the search waits for as many."""
    plans = [model.plan for model in models if isinstance(model.plan, Plan)]
    if not plans:
        return options
    largest = max(plans, key=lambda plan: len(set(plan.devices)))
    return replace(options, plan=largest)


@contextlib.asynccontextmanager
async def _opened(options: ClusterOptions, load: LoadOptions) -> AsyncIterator[AsyncCluster]:
    way = way_to(options, load)
    async with await getattr(AsyncCluster, way.verb)(*way.arguments, **way.named) as cluster:
        yield cluster
