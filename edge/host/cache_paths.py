"""The places of Edge's caches: EDGE_CACHE of the environment."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from edge.host.home import own_folder

CACHE_VARIABLE = "EDGE_CACHE"


def cache_root() -> Path:
    """The folder of all caches: EDGE_CACHE, or the user's cache folder of the system.

    Raises RequestError for a user without a home folder."""
    return own_folder(CACHE_VARIABLE, lambda: platformdirs.user_cache_dir("edge"))
