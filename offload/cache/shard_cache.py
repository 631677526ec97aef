"""The shard files of a peer, found by content, shared by all peers of a machine.

Finds, evicts and begins shards; `verified_shard.py` fills them.
"""

import contextlib
from pathlib import Path

from edge.offload.cache.folder_cache import FolderCache
from edge.offload.cache.verified_shard import (
    MANIFEST,
    PARTIAL,
    WEIGHTS,
    CachedShard,
    ShardWriter,
    allocated_bytes,
    folder_bytes,
    is_intact,
    is_marked_intact,
    mark_intact,
)
from edge.offload.errors import StoreCorruptError, StoreFullError
from edge.offload.files.manifest import Manifest, is_digest, texts_in


class ShardCache:
    """A cache of at most `limit_bytes` under `root`, which evicts the least recently used shards.

    Safe for several threads and processes. Raises StoreError if `root` cannot be used.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._folders = FolderCache(root, limit_bytes)

    def get(self, digest: str, *, verify: bool = False) -> CachedShard | None:
        """The complete shard with this manifest digest, or None.

        A shard whose file has a wrong size is removed. With `verify`, or if the file was written to
        after it was complete, all bytes are hashed, and a damaged shard is removed, too.
        """
        if not is_digest(digest):
            raise ValueError(f"{digest!r:.80} is not the digest of a manifest")
        with self._folders.locked():
            shard = self._open(digest)
        if shard is None or (is_marked_intact(shard.path.parent) and not verify):
            return shard
        if is_intact(shard):
            mark_intact(shard.path.parent)
            return shard
        shard.close()
        with self._folders.locked():
            self._folders.discard(digest)
        return None

    def begin(
        self,
        manifest: Manifest,
        *,
        owner: str | None = None,
        owner_limit_bytes: int | None = None,
    ) -> ShardWriter | CachedShard:
        """The shard if it is complete (see `get`), else a writer with all pieces that are here.

        These are the pieces of an interrupted writer, and equal pieces of other shards. Other
        shards are evicted as pieces arrive. Raises StoreFullError if that cannot be enough. A shard
        belongs to the `owner` that began it; with a limit, the owner's other shards are evicted at
        once until they are within it.
        """
        digest = manifest.digest
        shard = self.get(digest)
        if shard is not None:
            return shard
        with self._folders.locked():
            shard = self._open(digest)
            if shard is not None:  # another writer has just finished it
                return shard
            on_disk = allocated_bytes(self._folders.root / digest / PARTIAL)
            self._folders.check_room(digest, folder_bytes(manifest), on_disk_bytes=on_disk)
            if owner is not None and owner_limit_bytes is not None:
                self._folders.keep_within(owner, owner_limit_bytes, digest, folder_bytes(manifest))
            helpful = self._helpful(manifest)
            writer = self._start(digest, manifest)
            if owner is not None:
                self._folders.set_owner(digest, owner, folder_bytes(manifest))
        try:
            with contextlib.suppress(StoreFullError):  # these shards may be evicted themselves
                self._copy(helpful, writer)
        except BaseException:
            writer.close()
            raise
        return writer

    def _copy(self, helpful: list[str], writer: ShardWriter) -> None:
        """Copy the pieces that these shards have, unless the shards were evicted."""
        for name in helpful:
            with self._folders.locked():
                source = self._open(name)
            if source is not None:
                with source:
                    writer.copy_from(source, keep=helpful)

    def _start(self, digest: str, manifest: Manifest) -> ShardWriter:
        use = self._folders.use(digest)
        try:
            draft = use.folder / f"{MANIFEST}.partial"
            draft.write_text(manifest.to_json())
            draft.replace(use.folder / MANIFEST)
            (use.folder / PARTIAL).touch()
            spoken_for = self._folders.room_bytes(digest)
            on_disk = allocated_bytes(use.folder / PARTIAL)
            self._folders.set_room(digest, max(spoken_for, on_disk))
            return ShardWriter(self._folders, use, manifest)
        except BaseException:
            use.close()
            raise

    def _open(self, digest: str) -> CachedShard | None:
        """Open a complete shard. Called under the root's lock."""
        manifest = self._read(digest)
        if manifest is None:
            return None
        return CachedShard(self._folders.use(digest), manifest)

    def _read(self, digest: str) -> Manifest | None:
        """The manifest of a shard with the right sizes. Removes a damaged shard."""
        folder = self._folders.root / digest
        try:
            size = (folder / WEIGHTS).stat().st_size
        except FileNotFoundError:
            return None
        try:
            manifest = Manifest.read(folder / MANIFEST)
        except (FileNotFoundError, StoreCorruptError):
            manifest = None
        if manifest is None or manifest.digest != digest or manifest.total_bytes != size:
            self._folders.discard(digest)
            return None
        return manifest

    def _helpful(self, manifest: Manifest) -> list[str]:
        """Other complete shards that together have all available pieces of this one.

        Only as many as are needed, the most recently used first. While a shard is read it cannot be
        evicted for another peer that shares this cache.
        """
        lacking = {piece.digest for _, piece in manifest.placements()}
        helpful = []
        for name in filter(is_digest, reversed(self._folders.folders())):
            if not lacking:
                break
            folder = self._folders.root / name
            if lacking.isdisjoint(texts_in(folder / MANIFEST)) and is_marked_intact(folder):
                continue  # most are of other models, and reading their manifests takes far longer
            other = self._read(name)
            had = set() if other is None else {p.digest for _, p in other.placements()} & lacking
            if had:
                helpful.append(name)
                lacking -= had
        return helpful
