"""Lists Edge's caches on this disk by model and age, and removes unused files."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from edge.errors import RequestError, printable
from edge.host.cache_paths import cache_remedy
from edge.offload import FolderCache, KeptFolder, StoreError
from edge.protocol.kept_files import MOST_FILES, KeptFiles
from edge.system.files import disk_bytes
from edge.weights.hub_cache import UNFINISHED, repository_of
from edge.weights.writer_lock import is_written

OF_PEERS = {
    "shards": "shards",
    "packed": "packed shards",
}
"""Weights that coordinators sent to this device, and packed weights made from them."""
_OF_FOLDERS = {
    **OF_PEERS,
    "quantized": "rounded weights",
    "statistics": "input sums",
}
_OF_FILES = {
    "manifests": "manifests",
    "measured": "measurements",
    "tied-heads": "comparisons of heads",
    "tuning": "GPU tuning",
    "bench": "benchmark models",
}
_CACHES = {**_OF_FOLDERS, **_OF_FILES}
"""Kinds of caches, with their folders below the root of all caches."""
_DOWNLOADS = "downloads"
KINDS = {**_CACHES, _DOWNLOADS: "unfinished downloads"}
"""Kinds of cached files, with their names for people."""


def kept_files(
    root: Path, *, kinds: Collection[str] = tuple(_CACHES), user: str | None = None
) -> tuple[KeptFiles, ...]:
    """Cached files, the least recently used first.

    user: the device that asks. Files of others are joined to one entry, because a shard's name is a
    hash of its contents, and its size reveals nearly as much.

    Raises RequestError for a cache that cannot be read.
    """
    now_s = time.time()
    found: list[KeptFiles] = []
    for kind in kinds:
        if kind in _OF_FILES:
            found += _of_files(root, kind, now_s)
            continue
        others = []
        for folder in _folders(root, kind):
            if user is not None and folder.owner not in (None, user):
                others.append(folder)
                continue
            found.append(
                KeptFiles(
                    kind=kind,
                    name=f"{kind}/{printable(folder.name, 200)}",
                    model=printable(folder.model, 500) if folder.model else None,
                    bytes=folder.nbytes,
                    unused_s=max(0.0, now_s - folder.last_used_s),
                    in_use=folder.is_used,
                )
            )
        if others:
            found.append(
                KeptFiles(
                    kind=kind,
                    name=f"{kind}/of other devices",
                    model=None,
                    bytes=sum(each.nbytes for each in others),
                    unused_s=max(0.0, now_s - max(each.last_used_s for each in others)),
                    in_use=any(each.is_used for each in others),
                )
            )
    return tuple(sorted(found, key=lambda each: -each.unused_s)[:MOST_FILES])


def remove_kept(
    root: Path,
    names: Collection[str],
    *,
    kinds: Collection[str] = tuple(_CACHES),
    user: str | None = None,
) -> None:
    """Remove the unused ones of these files. user: remove only what this device sent, and ignore
    other names.

    Raises RequestError for a cache that cannot be written.
    """
    for kind in kinds:
        wanted = {name.partition("/")[2] for name in names if name.partition("/")[0] == kind}
        if kind in _OF_FILES:
            if wanted:
                shutil.rmtree(root / kind, ignore_errors=True)
            continue
        own = {each.name for each in _folders(root, kind) if user is None or each.owner == user}
        if wanted & own:
            with _cache(root / kind) as cache:
                cache.remove_unused(wanted & own)


def unfinished_downloads(hub_cache: Path) -> Iterator[KeptFiles]:
    """Downloads that Edge began in the Hugging Face cache."""
    now_s = time.time()
    for path in hub_cache.glob(f"*/blobs/*{UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            model = repository_of(path.parents[1])
            yield KeptFiles(
                kind=_DOWNLOADS,
                name=f"{_DOWNLOADS}/{printable(str(path.relative_to(hub_cache)), 500)}",
                model=printable(model, 500) if model else None,
                bytes=disk_bytes(status),
                unused_s=max(0.0, now_s - status.st_mtime),
                in_use=is_written(path.parent),
            )


def remove_unfinished(hub_cache: Path, names: Collection[str]) -> None:
    """Remove these unfinished downloads, except those in progress."""
    for path in hub_cache.glob(f"*/blobs/*{UNFINISHED}"):
        name = f"{_DOWNLOADS}/{path.relative_to(hub_cache)}"
        if name in names and not is_written(path.parent):
            path.unlink(missing_ok=True)


def _folders(root: Path, kind: str) -> list[KeptFolder]:
    if not (root / kind).is_dir():
        return []
    with _cache(root / kind) as cache:
        return cache.kept()


@contextlib.contextmanager
def _cache(root: Path) -> Iterator[FolderCache]:
    """A cache of folders, with its lock held."""
    try:
        cache = FolderCache(root, 0)  # no room is needed
        with cache.locked():
            yield cache
    except StoreError as error:
        raise RequestError(str(error), remedy=cache_remedy(str(error))) from error


def _of_files(root: Path, kind: str, now_s: float) -> Iterator[KeptFiles]:
    """The small files of one kind, as one entry."""
    nbytes, newest_s = 0, 0.0
    for path in (root / kind).rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            nbytes += disk_bytes(status)
            newest_s = max(newest_s, status.st_mtime)
    if nbytes:
        yield KeptFiles(
            kind=kind,
            name=f"{kind}/",
            model=None,
            bytes=nbytes,
            unused_s=max(0.0, now_s - newest_s),
            in_use=False,
        )
