"""`edge models`: the models on this disk and on peers, and how they would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from edge.api.cluster import Cluster
from edge.api.hub_download import hub_cache
from edge.api.known_models import KnownModel, describe_model, models_here
from edge.cli.field_options import given_options
from edge.cli.inspect_view import in_short
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.records import Columns, json_option, make_table, print_json, print_table
from edge.cli.sentences import print_sentence
from edge.errors import EdgeError, printable
from edge.host.cache_paths import cache_root
from edge.host.free_memory import format_size
from edge.memory.disk_cache import OF_PEERS, kept_files
from edge.planning.rate_words import rate_in_words
from edge.protocol.kept_files import KeptFiles
from edge.studies.inspection import HeldAs, Inspection
from edge.weights.formats import AUTO

HERE = "this device"
_LOOK_FOR_S = 2.0
"""Seconds to search for peers: enough for those that answer, and short without any."""


@click.command("models", short_help="List the models on this disk, and how they would run.")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--here", is_flag=True, help="Ask no peers: does it fit this device alone?")
@given_options("wanted", ClusterOptions, only=("addresses", "cluster", "interfaces", "insecure"))
@json_option
def command(folders: tuple[Path, ...], here: bool, wanted: ClusterOptions, as_json: bool) -> None:
    """List the models in the Hugging Face cache and in FOLDERS: whether each fits the peers, and
    its predicted speed. Then the weights that this device and the peers keep for the next load.

    Nothing is measured: a speed is shown if every device was measured for that model before (`edge
    plan MODEL` measures). Only headers are read, and nothing is downloaded.

    \b
    Examples:
      edge models
      edge models ~/models --here
      edge models --peer 192.168.1.7:5000 --json
    """
    with ExitStack() as stack:
        cluster, note = None, None
        if not here:
            try:
                cluster = stack.enter_context(open_cluster(wanted, timeout_s=_LOOK_FOR_S))
            except EdgeError as error:
                note = f"No peers were asked: {error}"
        propose = None if cluster is None else partial(cluster.propose, measure="nothing")
        models = [
            describe_model(name, place, propose)
            for name, place in models_here(folders, hub_cache=hub_cache())
        ]
        kept = _kept(cluster)
    if as_json:
        value = {"models": [_as_json(each) for each in models], "kept": _kept_as_json(kept)}
        print_json({**value, "note": note})
        return
    _print(models, kept, note)


def _kept(cluster: Cluster | None) -> dict[str, Sequence[KeptFiles]]:
    found: dict[str, Sequence[KeptFiles]] = {HERE: kept_files(cache_root(), kinds=OF_PEERS)}
    shown = {each.name for each in found[HERE]}
    if cluster is not None:
        for peer in cluster.peers:
            found[peer.name] = [each for each in cluster.kept(peer) if each.name not in shown]
    return found


def _as_json(model: KnownModel) -> dict[str, Any]:
    found = model.inspection
    held = _held(model)
    return {
        "name": model.name,
        "path": None if model.path is None else str(model.path),
        "problem": model.problem,
        "family": None if found is None else found.family,
        "parameters": None if found is None else found.parameters,
        "stored_bytes": None if found is None else found.stored_bytes,
        "context_tokens": None if found is None else found.context_tokens,
        "memory_bytes": None if held is None else held.total_bytes,
        "fits_this_device": None if held is None else held.fits,
        "fit": None if model.fit is None else asdict(model.fit),
    }


def _kept_as_json(kept: Mapping[str, Sequence[KeptFiles]]) -> list[dict[str, Any]]:
    return [
        {"device": device, "model": model, "bytes": size}
        for device, files in kept.items()
        for model, size in _by_model(files).items()
    ]


def _by_model(files: Sequence[KeptFiles]) -> dict[str | None, int]:
    sizes: dict[str | None, int] = {}
    for each in files:
        sizes[each.model] = sizes.get(each.model, 0) + each.bytes
    return sizes


def _held(model: KnownModel) -> HeldAs | None:
    """The model as it is held by default."""
    held = () if model.inspection is None else model.inspection.held
    return next((each for each in held if each.dtype == AUTO), None)


def _print(
    models: Sequence[KnownModel], kept: Mapping[str, Sequence[KeptFiles]], note: str | None
) -> None:
    console = Console()
    if models:
        print_table(
            make_table(models, _COLUMNS, right=("weights", "on disk", "in memory")), console
        )
    for line in _sentences(models, kept, note):
        print_sentence(console, line)


def _fits(model: KnownModel) -> str:
    fit, held = model.fit, _held(model)
    if fit is None:
        return HERE if held is not None and held.fits else "no"
    if not fit.devices:
        return "no"
    where = fit.devices[0] if len(fit.devices) == 1 else f"{len(fit.devices)} devices"
    return f"{where}, from disk" if fit.streamed else where


def _speed(model: KnownModel) -> str | None:
    fit = model.fit
    if fit is None or fit.tokens_per_s is None or fit.tokens_per_s_range is None:
        return None
    return f"{rate_in_words(fit.tokens_per_s, fit.tokens_per_s_range)} tokens/s"


def _of_header(cell: Callable[[Inspection], str | None]) -> Callable[[KnownModel], str | None]:
    return lambda model: None if model.inspection is None else cell(model.inspection)


def _in_memory(model: KnownModel) -> str | None:
    held = _held(model)
    return None if held is None else format_size(held.total_bytes)


_COLUMNS: Columns[KnownModel] = {
    "model": lambda model: model.name,
    "family": _of_header(lambda found: found.family),
    "weights": _of_header(
        lambda found: None if found.parameters is None else in_short(found.parameters)
    ),
    "on disk": _of_header(lambda found: format_size(found.stored_bytes)),
    "in memory": _in_memory,
    "fits": _fits,
    "speed": _speed,
}


def _sentences(
    models: Sequence[KnownModel], kept: Mapping[str, Sequence[KeptFiles]], note: str | None
) -> Iterator[str]:
    if not models:
        yield (
            f"There is no model in the Hugging Face cache ({hub_cache()}); name a folder, or run "
            'one by its name: edge run org/name -p "Hello".'
        )
    for each in models:
        if each.problem is not None:
            yield f"{printable(each.name)}: {printable(each.problem)}"
    if any(each.fit is not None and each.fit.devices and _speed(each) is None for each in models):
        yield "No speed is shown if a device was not measured: edge plan MODEL measures it."
    for device, files in kept.items():
        sizes = _by_model(files).items()
        words = [f"{format_size(size)} of {model or 'other models'}" for model, size in sizes]
        if words:
            yield f"{device} keeps {', '.join(words)}."
    if note is not None:
        yield note
