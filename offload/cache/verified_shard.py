"""A shard's file, filled piece by piece in any order, and not evicted while in use.

A shard is one folder named by its manifest's digest:

    manifest.json     the contents of the file
    weights           the file, complete and never changed again
    weights.partial   the file while pieces still arrive
    journal           a digest per line, appended after the piece's bytes were written
    intact            the file's stat data when its bytes were last verified

Several writers of one shard help each other: they write equal bytes to equal places, and find each
other's pieces in the journal. A journalled piece counts only after its bytes were hashed again, so
neither a killed process nor a page lost in a power cut can make a wrong file.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Container
from pathlib import Path

from edge.offload.cache.folder_cache import FolderCache, FolderUse, note_model
from edge.offload.errors import StoreCorruptError, StoreError, StoreFullError
from edge.offload.files.closing import Closing
from edge.offload.files.durable import disk_errors_as_store_errors, write_all
from edge.offload.files.manifest import PIECE_BYTES, Manifest, piece_digest
from edge.system.files import disk_bytes, is_own, others_may, read_at, sync_folder

MANIFEST = "manifest.json"
WEIGHTS = "weights"
PARTIAL = "weights.partial"
_JOURNAL = "journal"
_INTACT = "intact"
MARK_BYTES = 64
"""Size of the file `intact`."""
_DIGEST_CHARACTERS = 64

_ROOM_AHEAD_BYTES = 8 * PIECE_BYTES
"""Bytes for which room is made at once, because making room looks at every folder."""


class CachedShard(Closing):
    """A complete shard, kept from eviction until `close`; also a context manager.

    `path` is the file of weights with the layout of `manifest`. Never write to it.
    """

    def __init__(self, use: FolderUse, manifest: Manifest) -> None:
        self.path = use.folder / WEIGHTS
        self.manifest = manifest
        self._use = use

    def note(self, model: str) -> None:
        """Note the name of the shard's model."""
        note_model(self._use.folder, model)

    def close(self) -> None:
        """Allow the cache to evict the shard. A mapped file stays readable."""
        self._use.close()


class ShardWriter(Closing):
    """Writes a shard's pieces as they arrive; `close` without `finish` keeps them for later.

    `put` is thread-safe. Also a context manager.
    """

    def __init__(self, folders: FolderCache, use: FolderUse, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folders = folders
        self._use = use
        self._offsets: dict[str, list[int]] = {}
        self._sizes: dict[str, int] = {}
        for offset, piece in manifest.placements():
            self._offsets.setdefault(piece.digest, []).append(offset)
            self._sizes[piece.digest] = piece.nbytes
        self._received: set[str] = set()
        self._room_left = 0
        self._journal_end = 0
        self._mutex = threading.Lock()
        with contextlib.ExitStack() as stack:
            self._data = stack.enter_context((use.folder / PARTIAL).open("r+b", buffering=0))
            self._journal = stack.enter_context((use.folder / _JOURNAL).open("a+b", buffering=0))
            os.truncate(self._data.fileno(), manifest.total_bytes)
            (use.folder / _INTACT).write_bytes(bytes(MARK_BYTES))  # reserves its room
            self._files = stack.pop_all()

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing digests, in the order of the file, without pieces of other writers."""
        with self._mutex:
            self._read_journal()
            return tuple(d for d in self._offsets if d not in self._received)

    def put(
        self,
        digest: str,
        content: bytes | bytearray | memoryview,
        *,
        keep: Container[str] = (),
    ) -> None:
        """Write a piece to all of its places. A piece that was written before is only checked.

        Evicts other shards for it, those in `keep` last. Raises StoreCorruptError, and writes
        nothing, if the shard has no such piece or `content` has another hash; StoreFullError if
        there is no room. Earlier pieces stay.
        """
        if digest not in self._offsets:
            raise StoreCorruptError(f"piece {digest:.80} does not belong to this shard; ask anew")
        view = memoryview(content).cast("B")
        if len(view) != self._sizes[digest] or piece_digest(view) != digest:
            raise StoreCorruptError(
                f"piece {digest} arrived as {len(view):,} other bytes than its name says; "
                "ask for it again, from another peer if that fails too"
            )
        with self._mutex:
            if digest in self._received:
                return
            self._take_room(len(view) * len(self._offsets[digest]), keep)
        with disk_errors_as_store_errors(self._use.folder):
            for offset in self._offsets[digest]:
                write_all(self._data.fileno(), view, offset)
            # Journalled after the bytes: a process killed before has not received the piece.
            with self._mutex:
                self._journal.write(f"{digest}\n".encode())
                self._received.add(digest)

    def finish(self) -> CachedShard:
        """Make the file visible under its final name, durably, and close the writer.

        Raises ValueError while pieces are missing, StoreCorruptError if the folder was removed.
        """
        missing = self.missing
        if missing:
            raise ValueError(f"{len(missing)} pieces of the shard have not arrived yet")
        folder = self._use.folder
        with disk_errors_as_store_errors(folder):
            os.fsync(self._data.fileno())
        with self._folders.locked():
            # Another writer of the same file may have finished it already.
            path = folder / (WEIGHTS if (folder / WEIGHTS).exists() else PARTIAL)
            if not path.exists() or not os.path.samestat(
                path.stat(), os.fstat(self._data.fileno())
            ):
                raise StoreCorruptError(
                    f"{folder} was removed while it was written; begin the shard again"
                )
            path.replace(folder / WEIGHTS)
            self._folders.set_room(folder.name, None)
            (folder / _JOURNAL).unlink(missing_ok=True)
            mark_intact(folder)
            sync_folder(folder)
        self._files.close()
        return CachedShard(self._use, self.manifest)

    def close(self) -> None:
        """Stop writing. Does nothing after `finish`, when the CachedShard keeps the folder."""
        if not self._data.closed:
            self._files.close()
            self._use.close()
            with contextlib.suppress(StoreError), self._folders.locked():
                self._leave_nothing_for_nothing()

    def _leave_nothing_for_nothing(self) -> None:
        """Remove a shard without pieces, for which no room was made."""
        folder = self._use.folder
        with contextlib.suppress(FileNotFoundError):
            is_empty = not (folder / _JOURNAL).stat().st_size and not (folder / WEIGHTS).exists()
            if is_empty and not self._folders.is_used(folder.name):
                self._folders.discard(folder.name)

    def _take_room(self, num_bytes: int, keep: Container[str]) -> None:
        """Make room on disk for these bytes and some more, before they are written."""
        if num_bytes > self._room_left:
            with self._folders.locked():
                self._make_room(num_bytes, keep)
        self._room_left = max(0, self._room_left - num_bytes)

    def _make_room(self, num_bytes: int, keep: Container[str]) -> None:
        folder, most = self._use.folder, folder_bytes(self.manifest)
        if not folder.exists() or (folder / WEIGHTS).exists():
            return  # removed, or finished by another writer; `finish` detects both
        before = self._folders.room_bytes(folder.name)
        on_disk = allocated_bytes(folder / PARTIAL)
        first = 0 if before else most - self.manifest.total_bytes
        for ahead in (max(num_bytes, _ROOM_AHEAD_BYTES), num_bytes):
            total = min(most, before + first + ahead)
            try:
                self._folders.make_room(folder.name, total, on_disk_bytes=on_disk, keep=keep)
            except StoreFullError:
                if ahead == num_bytes:
                    raise
            else:
                self._folders.set_room(folder.name, total)
                self._room_left += total - before
                return

    def copy_from(self, shard: CachedShard, *, keep: Container[str] = ()) -> None:
        """Copy missing pieces from `shard`, without damaged ones."""
        missing = set(self.missing)
        with shard.path.open("rb", buffering=0) as file:
            for offset, piece in shard.manifest.placements():
                if piece.digest in missing:
                    content = read_at(file.fileno(), piece.nbytes, offset)
                    with contextlib.suppress(StoreCorruptError):
                        self.put(piece.digest, content, keep=keep)
                        missing.discard(piece.digest)

    def _read_journal(self) -> None:
        """Count newly journalled pieces whose bytes have their digest."""
        end = os.fstat(self._journal.fileno()).st_size
        text = read_at(self._journal.fileno(), end - self._journal_end, self._journal_end)
        complete = text.rfind(b"\n") + 1
        self._journal_end += complete
        for line in text[:complete].splitlines():
            # A line that a full disk cut off has no end, and the next line follows it.
            digest = line[-_DIGEST_CHARACTERS:].decode(errors="replace")
            if digest not in self._received and self._is_written(digest):
                self._received.add(digest)

    def _is_written(self, digest: str) -> bool:
        size = self._sizes.get(digest, 0)
        return digest in self._offsets and all(
            piece_digest(read_at(self._data.fileno(), size, offset)) == digest
            for offset in self._offsets[digest]
        )


def folder_bytes(manifest: Manifest) -> int:
    """Bytes of the shard's folder on disk."""
    return manifest.total_bytes + len(manifest.to_json()) + MARK_BYTES


def allocated_bytes(path: Path) -> int:
    """Bytes of a file on disk, without holes; 0 if it is missing."""
    try:
        return disk_bytes(path.stat())
    except FileNotFoundError:
        return 0


def is_intact(shard: CachedShard) -> bool:
    """Whether every byte of the shard has its digest."""
    try:
        with shard.path.open("rb", buffering=0) as file:
            return all(
                piece_digest(read_at(file.fileno(), piece.nbytes, offset)) == piece.digest
                for offset, piece in shard.manifest.placements()
            )
    except OSError:
        return False


def mark_intact(folder: Path) -> None:
    """Mark the folder's weights as verified, until they are written to."""
    with contextlib.suppress(OSError):  # without a mark they are hashed again
        (folder / _INTACT).write_text(_state(folder / WEIGHTS))


def is_marked_intact(folder: Path) -> bool:
    """Whether the weights were not written to after they were verified.

    Users who may write to the folder could write a mark, so it counts only if others may not.
    """
    try:
        is_marked = (folder / _INTACT).read_text() == _state(folder / WEIGHTS)
        return is_marked and not _may_be_written_by_others(folder.parent)
    except (OSError, ValueError):
        return False


def _may_be_written_by_others(root: Path) -> bool:
    """Whether users other than this one and root may write to the folder."""
    status = root.stat()
    return not is_own(status, or_root=True) or others_may(status, 0o022)


def _state(path: Path) -> str:
    """The file's stat data, which changes with every write or replacement."""
    status = path.stat()
    told = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return hashlib.sha256(told.encode()).hexdigest()
