"""The places of Edge's caches: EDGE_CACHE."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "EDGE_CACHE"


def cache_root() -> Path:
    """The folder of all caches: EDGE_CACHE, or the user's cache folder of the system."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("edge"))
