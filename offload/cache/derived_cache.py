"""A cache of files derived from other files, found by the hash of their source and method.

A folder is named by the hash of its key and holds `weights` and its `manifest.json`. Both are
complete or missing, because the weights get their name last. A new method needs a new key.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.offload.cache.folder_cache import FolderCache, FolderUse, owner_of
from edge.offload.cache.verified_shard import (
    MANIFEST,
    WEIGHTS,
    CachedShard,
    is_intact,
    is_marked_intact,
    mark_intact,
)
from edge.offload.errors import StoreCorruptError
from edge.offload.files.closing import Closing
from edge.offload.files.durable import disk_errors_as_store_errors, write_all
from edge.offload.files.manifest import Manifest, ManifestBuilder
from edge.system.files import sync_folder

_SCRATCH = ".scratch-"
_DRAFT = ".partial"


class DerivedCache:
    """A cache of at most `limit_bytes` under `root`, which evicts the least recently used files."""

    def __init__(
        self, root: Path, limit_bytes: int, *, owner_limit_bytes: int | None = None
    ) -> None:
        """owner_limit_bytes: of files derived from one owner's folders. Files in use stay, and may
        exceed it.

        Raises StoreError if `root` cannot be used."""
        self._folders = FolderCache(root, limit_bytes)
        self._owner_limit_bytes = owner_limit_bytes
        with self._folders.locked():
            self._remove_scratch()
            self._remove_drafts()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the same disk, removed when the context ends or by a later process."""
        with self._folders.locked():
            folder = self._folders.root / f"{_SCRATCH}{uuid.uuid4().hex}"
            folder.mkdir()
            use = FolderUse(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            use.close()

    def get(self, key: str) -> CachedShard | None:
        """The file made under this key, or None; a damaged one is removed.

        All bytes are hashed if the file was written to since.
        """
        name = _name(key)
        with self._folders.locked():
            folder = self._folders.root / name
            try:
                manifest = Manifest.read(folder / MANIFEST)
                size = (folder / WEIGHTS).stat().st_size
            except (FileNotFoundError, StoreCorruptError):
                return None
            if size != manifest.total_bytes:
                self._folders.discard(name)
                return None
            shard = CachedShard(self._folders.use(name), manifest)
        if is_marked_intact(folder):
            return shard
        if is_intact(shard):
            mark_intact(folder)
            return shard
        shard.close()
        self.discard(key)
        return None

    def _remove_scratch(self) -> None:
        for folder in self._folders.root.glob(f"{_SCRATCH}*"):
            if not self._folders.is_used(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_drafts(self) -> None:
        """Remove drafts of dead processes. Folders in use may hold drafts of live ones and stay."""
        for draft in self._folders.root.glob(f"*/*{_DRAFT}"):
            if not self._folders.is_used(draft.parent.name):
                draft.unlink(missing_ok=True)

    def discard(self, key: str) -> None:
        """Remove the entry of `key`, after it was found damaged."""
        with self._folders.locked():
            self._folders.discard(_name(key))

    def begin(self, key: str, total_bytes: int, *, made_of: Path | None = None) -> DerivedWriter:
        """Begin to write the entry of `key`, of about `total_bytes`. made_of: the folder from which
        it is derived, whose owner it gets.

        Raises StoreFullError if there is no room for it.
        """
        name = _name(key)
        owner = None if made_of is None else owner_of(made_of)
        with self._folders.locked():
            if not self._folders.is_used(name):
                self._folders.discard(name)  # drafts of a dead process
            if owner is not None and self._owner_limit_bytes is not None:
                self._folders.keep_near(owner, self._owner_limit_bytes, name, total_bytes)
            self._folders.make_room(name, total_bytes)
            use = self._folders.use(name)
            if made_of is not None:
                use.note_model_of(made_of)
            if owner is not None:
                self._folders.set_owner(name, owner, total_bytes)
            return DerivedWriter(self._folders, use)


class DerivedWriter(Closing):
    """Writes tensors one by one; `close` without `finish` leaves nothing. A context manager."""

    def __init__(self, folders: FolderCache, use: FolderUse) -> None:
        self._folders = folders
        self._use = use
        self._builder = ManifestBuilder()
        self._draft = use.folder / f"{uuid.uuid4().hex}{_DRAFT}"
        self._data = self._draft.open("wb", buffering=0)

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append a tensor. Raises StoreFullError if the disk is full."""
        entry = self._builder.add(name, array)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with disk_errors_as_store_errors(self._use.folder):
            write_all(self._data.fileno(), flat.data, entry.offset)

    def finish(self) -> CachedShard:
        """Make the file visible, durably. Raises StoreCorruptError if the folder was removed."""
        manifest = self._builder.build()
        folder = self._use.folder
        with disk_errors_as_store_errors(folder):
            os.truncate(self._data.fileno(), manifest.total_bytes)
            os.fsync(self._data.fileno())
        with self._folders.locked():
            if not self._draft.exists():
                raise StoreCorruptError(f"{folder} was removed while it was written; try again")
            described = self._draft.with_suffix(".json")
            described.write_text(manifest.to_json())
            described.replace(folder / MANIFEST)
            self._draft.replace(folder / WEIGHTS)
            mark_intact(folder)
            sync_folder(folder)
        self._data.close()
        return CachedShard(self._use, manifest)

    def close(self) -> None:
        """Stop writing. Does nothing after `finish`, when the CachedShard keeps the folder."""
        if not self._data.closed:
            self._data.close()
            with contextlib.suppress(OSError):
                self._draft.unlink(missing_ok=True)
            self._use.close()


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
