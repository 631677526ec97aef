"""The Hugging Face cache on this disk, in the layout of `huggingface_hub`.

A folder models--org--name for each repository; in it one for each commit, with links to the files.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".edge-unfinished"
"""Ends the name of a file that is being fetched, or was."""
_BEGINNING = "models--"


def folder_of(repository: str) -> str:
    """The name of its folder in the cache."""
    return f"{_BEGINNING}{repository.replace('/', '--')}"


def repository_of(folder: Path) -> str | None:
    """The name of the repository whose cache folder this is, by the folder's name; None for other
    folders."""
    if not folder.name.startswith(_BEGINNING):
        return None
    return folder.name.removeprefix(_BEGINNING).replace("--", "/", 1)


def cached_repositories(hub_cache: Path) -> list[str]:
    """Names of the models' repositories in the cache, whole or not."""
    folders = (folder for folder in hub_cache.glob(f"{_BEGINNING}*") if folder.is_dir())
    return sorted(name for name in map(repository_of, folders) if name is not None)


def display_name(folder: Path) -> str:
    """The name of a checkpoint's folder; of one in the cache org/name, not that of its commit."""
    repository = repository_of(folder.parent.parent)
    return folder.name if folder.parent.name != "snapshots" or repository is None else repository


def name_of_file(file: str) -> str:
    """The name of a file or folder as others can read it: bytes that are no UTF-8, and line breaks,
    are escaped."""
    return "".join(
        each.encode("unicode_escape").decode()
        if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")
        else each
        for each in file
    )


def snapshots(folder: Path, revision: str) -> Iterator[Path]:
    """Commits of a repository: the one that is meant; of "main" then others, the newest first."""
    place = folder / "snapshots"
    try:
        commit = (folder / "refs" / revision).read_text(errors="replace")[:100].strip()
    except OSError:
        commit = revision  # a commit is named by itself
    first = place / commit if re.fullmatch(r"\w+", commit, re.ASCII) else None
    if first is not None and first.is_dir():
        yield first
    if revision == "main" and place.is_dir():
        others = [path for path in place.iterdir() if path.is_dir() and path != first]
        yield from sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
