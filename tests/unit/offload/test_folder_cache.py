"""Folders that several processes share: which one goes first."""

from __future__ import annotations

from pathlib import Path

from edge.offload.cache.folder_cache import FolderCache


def test_uses_in_one_moment_are_told_apart(tmp_path: Path) -> None:
    """The clock that the system gives files stands still for milliseconds."""
    cache = FolderCache(tmp_path, 1 << 20)
    names = [f"{number:02}" for number in range(20)]
    with cache.locked():
        for name in names:
            cache.use(name).close()
        for name in reversed(names):
            cache.use(name).close()
    assert cache.folders() == names[::-1]
