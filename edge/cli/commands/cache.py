"""`edge cache`: shows and removes Edge's files on disk, here and on peers."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import click
from rich.console import Console

from edge.answers.documents import Document
from edge.api.cluster import Cluster
from edge.api.hub_download import hub_cache
from edge.api.kept_documents import kept_documents
from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.records import Columns, json_option, make_table, print_json, print_table
from edge.cli.sentences import print_sentence
from edge.errors import RequestError, printable
from edge.host.cache_paths import cache_root
from edge.host.free_memory import format_size
from edge.host.identity import host_id
from edge.memory.disk_cache import (
    KINDS,
    kept_files,
    remove_kept,
    remove_unfinished,
    unfinished_downloads,
)
from edge.protocol.kept_files import KeptFiles

HERE = "this device"
_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlace:
    """A device whose files are shown or removed."""

    name: str
    files: tuple[KeptFiles, ...]
    remove: Callable[[Sequence[str]], tuple[KeptFiles, ...]]
    """Removes files by name; returns the files that stay."""


_of_peers = click.option(
    "--peers", "with_peers", is_flag=True, help="Peers, too: the files that this device sent them."
)
_cluster = given_options(
    "wanted", ClusterOptions, only=("addresses", "cluster", "interfaces", "insecure")
)


@click.group("cache", short_help="Show or remove Edge's files on disk.")
def command() -> None:
    """Show or remove the files that Edge keeps on disk. They are made again when needed.

    Models from Hugging Face are not Edge's: `edge models` shows them, `hf cache` removes them.
    Unfinished downloads of Edge are shown here.

    \b
    shards            weights that coordinators sent to this device, in pieces
    packed shards     the same, packed for streaming layer by layer
    rounded weights   checkpoints of this device, quantized to the format of a --dtype
    input sums        observations of edge quantize
    manifests         contents of shards that this device has sent
    measurements      of devices and links, for plans

    \b
    Examples:
      edge cache show                                files by model and age
      edge cache show --peers                        those on peers, too
      edge cache clean --older-than 30d --dry-run    only show the files
      edge cache clean --model org/name --peers
      edge cache clean --all --yes                   in scripts
      edge cache documents                           texts of edge keep
      edge cache drop handbook
    """


@command.command()
@_of_peers
@_cluster
@json_option
def show(with_peers: bool, wanted: ClusterOptions, as_json: bool) -> None:
    """Show files on disk, by model and age."""
    with _places(wanted, with_peers=with_peers) as places:
        files = {place.name: place.files for place in places}
    if as_json:
        print_json(_told(files))
        return
    _print(files)


@command.command()
@json_option
def documents(as_json: bool) -> None:
    """Show the documents that `edge keep` has kept."""
    folder = kept_documents()
    found = [_without_text(folder.read(name)) for name in folder.names()]
    if as_json:
        print_json(found)
    elif found:
        print_table(make_table(found, _DOCUMENTS))
    else:
        click.echo("No document is kept.")


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def drop(names: tuple[str, ...]) -> None:
    """Drop kept documents by their names."""
    kept_documents().remove(names)
    click.echo(f"{len(set(names))} dropped.")


def _without_text(document: Document) -> dict[str, Any]:
    told = asdict(document)
    del told["text"]
    return told


_DOCUMENTS: Columns[dict[str, Any]] = {
    "name": itemgetter("name"),
    "model": lambda each: printable(each["model"]),
    "tokens": lambda each: str(each["tokens"]),
    "kept": lambda each: f"{age_in_words(max(0.0, time.time() - each['kept_s']))} ago",
}


@command.command()
@click.option("--older-than", metavar="AGE", help="Files unused for this time: 12h, 30d or 4w.")
@click.option("--model", metavar="NAME", help="Files of the model with this name.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--dry-run", is_flag=True, help="Only show the files.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@_of_peers
@_cluster
@json_option
def clean(
    older_than: str | None,
    model: str | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    with_peers: bool,
    wanted: ClusterOptions,
    as_json: bool,
) -> None:
    """Remove files by age, by model, or all. Files in use stay.

    Shows the files and asks before it removes them. --older-than and --model together: files that
    match both.
    """
    if older_than is None and model is None and not everything:
        raise click.UsageError("nothing is chosen; give --older-than, --model or --all")
    least_s = 0.0 if older_than is None else parse_age(older_than)
    with _places(wanted, with_peers=with_peers) as places:
        going = {place.name: chosen(place.files, least_s=least_s, model=model) for place in places}
        if not dry_run and any(going.values()) and not yes:
            _print(going)
            _confirm()
        removed = going
        if not dry_run:
            removed = {place.name: _removed(place, going[place.name]) for place in places}
    if as_json:
        print_json({"dry_run": dry_run, "removed": _told(removed)})
        return
    if dry_run:
        _print(going)
    kept = sum(map(len, going.values())) - sum(map(len, removed.values()))
    total = format_size(sum(each.bytes for files in removed.values() for each in files))
    click.echo(f"{total} would be freed." if dry_run else f"{total} freed.")
    if kept:
        click.echo(f"{kept} stayed: in use, or sent by other devices.")


def parse_age(text: str) -> float:
    """Seconds in "12h", "30d", "4w". Raises RequestError."""
    found = re.fullmatch(r"(\d{1,6})\s*([mhdw])", text.strip().lower(), re.ASCII)
    if found is None:
        raise RequestError(f"{text!r:.40} is no age", remedy="write 12h, 30d or 4w")
    return int(found[1]) * _SECONDS[found[2]]


def chosen(
    files: Sequence[KeptFiles], *, least_s: float, model: str | None
) -> tuple[KeptFiles, ...]:
    """The files to remove: old enough, of the model, and not in use."""
    return tuple(
        each
        for each in files
        if not each.in_use
        and each.unused_s >= least_s
        and (model is None or (each.model or "").lower() == model.lower())
    )


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise RequestError("there is no terminal to ask on; give --yes, or --dry-run to look only")
    click.confirm("Remove this?", abort=True)


def _removed(place: KeptPlace, going: Sequence[KeptFiles]) -> tuple[KeptFiles, ...]:
    if not going:
        return ()
    left = {each.name for each in place.remove([each.name for each in going])}
    return tuple(each for each in going if each.name not in left)


@contextmanager
def _places(wanted: ClusterOptions, *, with_peers: bool) -> Iterator[list[KeptPlace]]:
    """This device, and the peers if asked for."""
    here = KeptPlace(name=HERE, files=_here(), remove=_remove_here)
    if not with_peers and not wanted.addresses:
        yield [here]
        return
    with open_cluster(wanted) as cluster:
        yield [here, *_of_cluster(cluster, here)]


def _of_cluster(cluster: Cluster, here: KeptPlace) -> Iterator[KeptPlace]:
    """The peers of the cluster, without this device's own files, which are shown already."""
    shown = {each.name for each in here.files}
    for peer in cluster.peers:
        files = cluster.kept(peer)
        if peer.host == host_id():
            files = tuple(each for each in files if each.name not in shown)
        yield KeptPlace(name=peer.name, files=files, remove=partial(cluster.remove_kept, peer))


def _here() -> tuple[KeptFiles, ...]:
    return (*kept_files(cache_root()), *unfinished_downloads(hub_cache()))


def _remove_here(names: Sequence[str]) -> tuple[KeptFiles, ...]:
    remove_kept(cache_root(), names)
    remove_unfinished(hub_cache(), names)
    return _here()


def _told(files: Mapping[str, Sequence[KeptFiles]]) -> list[dict[str, Any]]:
    return [{"device": name, **asdict(each)} for name, held in files.items() for each in held]


def _print(files: Mapping[str, Sequence[KeptFiles]]) -> None:
    """Print a row for each device, model and kind, the largest first."""
    groups: dict[tuple[str, str | None, str], list[KeptFiles]] = {}
    for device, held in files.items():
        for each in held:
            groups.setdefault((device, each.model, each.kind), []).append(each)
    if not groups:
        click.echo("Nothing is kept.")
        return
    by_size = sorted(groups.items(), key=lambda group: -_bytes(group))
    console = Console()
    print_table(make_table(by_size, _COLUMNS, right=("size",)), console)
    for device, held in files.items():
        total = format_size(sum(each.bytes for each in held))
        where = f" ({cache_root()})" if device == HERE else ""
        print_sentence(console, f"{total} on {device}{where}")


_Group = tuple[tuple[str, str | None, str], list[KeptFiles]]
"""A row: device, model and kind; and the files."""


def _bytes(group: _Group) -> int:
    return sum(each.bytes for each in group[1])


_COLUMNS: Columns[_Group] = {
    "device": lambda group: group[0][0],
    "model": lambda group: group[0][1],
    "what": lambda group: KINDS.get(group[0][2], group[0][2]),
    "size": lambda group: format_size(_bytes(group)),
    "last used": lambda group: age_in_words(min(each.unused_s for each in group[1])),
    "in use": lambda group: "yes" if any(each.in_use for each in group[1]) else "",
}


def age_in_words(seconds: float) -> str:
    """An age in words; less than two minutes is "now"."""
    for size, word in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word} ago"
    return "now"
