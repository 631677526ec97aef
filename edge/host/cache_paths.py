"""The places of Edge's caches: EDGE_CACHE of the environment."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from edge.errors import RequestError
from edge.host.home import own_folder

CACHE_VARIABLE = "EDGE_CACHE"


def cache_root() -> Path:
    """The folder of all caches: EDGE_CACHE, or the user's cache folder of the system.

    Raises RequestError for a user without a home folder."""
    return own_folder(CACHE_VARIABLE, lambda: platformdirs.user_cache_dir("edge"))


def cache_remedy(sentence: str) -> str | None:
    """The remedy for an error of the disk whose sentence names a file of the caches; None: it names
    none."""
    try:
        root = str(cache_root())
    except RequestError:
        return None
    return f"{CACHE_VARIABLE} names another folder for caches" if root in sentence else None
