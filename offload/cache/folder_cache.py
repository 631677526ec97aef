"""Folders under one root that several processes share: locks and eviction.

Both kinds of lock are `flock`, which the kernel frees when a process dies. The root's lock is held
briefly, to make, open or remove a folder. A folder's lock is shared and held while the folder is in
use; only folders without a holder are evicted. Knows nothing about the folders' contents.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge.offload.errors import StoreFullError
from edge.offload.files.closing import Closing
from edge.offload.files.durable import disk_errors_as_store_errors
from edge.offload.files.last_use import mark_used
from edge.system.files import disk_bytes
from edge.system.locks import lock, lock_now

_LOCK = ".lock"
_TRASH = ".trash-"
_OWNER = ".owner"
"""File with the owner of a folder, and the final bytes of the folder."""
_MODEL = ".model"
"""File with the name of the folder's model, for people."""
_MOST_NOTE_BYTES = 2000
_ROOM = ".room"
"""File whose size is the room of its folder, until the folder is complete."""


class FolderUse(Closing):
    """A folder that is not evicted until `close`; also a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = (folder / _LOCK).open("ab", buffering=0)
        try:
            lock(self._lock.fileno(), is_shared=True)
            mark_used(self._lock.fileno())
        except BaseException:
            self._lock.close()
            raise

    def note_model_of(self, other: Path) -> None:
        """Note the model of another folder, from which this one is made."""
        with contextlib.suppress(OSError):
            shutil.copyfile(other / _MODEL, self.folder / _MODEL)

    def close(self) -> None:
        """Set the time of last use to now, and allow eviction."""
        if not self._lock.closed:
            mark_used(self._lock.fileno())
            self._lock.close()


def note_model(folder: Path, model: str) -> None:
    """Write the name of the model of a cache's folder, unless it is there."""
    model = model[: _MOST_NOTE_BYTES // 4].encode(errors="replace").decode()
    if model != _note(folder / _MODEL):
        with contextlib.suppress(OSError):
            (folder / _MODEL).write_text(model, encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFolder:
    """Facts about a folder of a cache, for people."""

    name: str
    model: str | None
    """Name of its model; None if unknown."""
    owner: str | None
    nbytes: int
    """Bytes on disk."""
    last_used_s: float
    """Time of last use, in seconds since the epoch."""
    is_used: bool


class FolderCache:
    """A cache of folders under `root`, at most `limit_bytes`; evicts the least recently used."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Raises StoreError if `root` cannot be made or written."""
        self.root = root
        self.limit_bytes = limit_bytes
        with self.locked():
            self._empty_trash()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the root's lock. All methods except `folders` are called within.

        A root that was removed is made again. Raises StoreError if the disk or the folder fails,
        also within.
        """
        with disk_errors_as_store_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (self.root / _LOCK).open("ab", buffering=0) as file:
                lock(file.fileno(), waits=True)
                yield

    def folders(self) -> list[str]:
        """The names of all folders, the least recently used first."""
        return sorted(self._names(), key=lambda name: (_last_use_ns(self.root / name), name))

    def _names(self) -> list[str]:
        with os.scandir(self.root) as entries:
            return [each.name for each in entries if each.name[0] != "." and each.is_dir()]

    def use(self, name: str) -> FolderUse:
        """Keep the folder from eviction. Makes it if it is missing."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        return FolderUse(folder)

    def discard(self, name: str) -> None:
        """Remove a folder, used or not. Files that others have open stay readable to them."""
        trash = self.root / f"{_TRASH}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            (self.root / name).rename(trash)  # atomic, so that no process finds half a folder
            shutil.rmtree(trash, ignore_errors=True)

    def room_bytes(self, name: str) -> int:
        """The room of an incomplete folder; 0 if none was set."""
        try:
            return (self.root / name / _ROOM).stat().st_size
        except FileNotFoundError:
            return 0

    def set_room(self, name: str, total_bytes: int | None) -> None:
        """Count the folder as `total_bytes` from now on. None: by the sizes of its files."""
        path = self.root / name / _ROOM
        if total_bytes is None:
            path.unlink(missing_ok=True)
        else:
            path.touch()
            os.truncate(path, total_bytes)

    def set_owner(self, name: str, owner: str, total_bytes: int) -> None:
        """Set the folder's owner, unless it has one."""
        with contextlib.suppress(FileExistsError), (self.root / name / _OWNER).open("x") as file:
            file.write(f"{owner} {total_bytes}")

    def keep_within(self, owner: str, limit_bytes: int, name: str, total_bytes: int) -> None:
        """Evict other folders of the owner until `name` of `total_bytes` is within its limit.

        Raises StoreFullError, and evicts nothing, if too many are in use.
        """
        going, lacking = self._others_of(owner, limit_bytes, name, total_bytes)
        if lacking > 0:
            raise StoreFullError(
                f"{total_bytes:,} bytes are {lacking:,} more than one device may keep in the cache "
                f"{self.root}, which are {limit_bytes:,}: raise its limit, or share the model with "
                "more peers",
                bytes_missing=lacking,
            )
        for other in going:
            self.discard(other)

    def keep_near(self, owner: str, limit_bytes: int, name: str, total_bytes: int) -> None:
        """Evict unused folders of the owner for `name`, which may still exceed its limit."""
        going, _ = self._others_of(owner, limit_bytes, name, total_bytes)
        for other in going:
            self.discard(other)

    def _others_of(
        self, owner: str, limit_bytes: int, name: str, total_bytes: int
    ) -> tuple[list[str], int]:
        """The owner's folders to evict for `name`, the least recently used first, and the bytes
        that are still lacking then."""
        sizes = {
            other: size
            for other in self.folders()
            if other != name and (size := self._owned_bytes(other, owner))
        }
        lacking = sum(sizes.values()) + total_bytes - limit_bytes
        going = []
        for other, size in sizes.items():
            if lacking > 0 and not self.is_used(other):
                going.append(other)
                lacking -= size
        return going, lacking

    def _owned_bytes(self, name: str, owner: str) -> int:
        """Bytes of a folder; 0 if it belongs to another owner."""
        try:
            whose, _, size = (self.root / name / _OWNER).read_text().partition(" ")
            return int(size) if whose == owner else 0
        except (OSError, ValueError):
            return 0

    def make_room(
        self, name: str, total_bytes: int, *, on_disk_bytes: int = 0, keep: Container[str] = ()
    ) -> None:
        """Evict other folders until `name` may grow to `total_bytes`.

        on_disk_bytes: bytes that it has already. keep: folders that are evicted last. Raises
        StoreFullError, and evicts nothing, if that is not enough for the limit or the disk.
        """
        for other in self._in_the_way(name, total_bytes, on_disk_bytes, keep):
            self.discard(other)

    def check_room(self, name: str, total_bytes: int, *, on_disk_bytes: int = 0) -> None:
        """Raises StoreFullError as `make_room`. Evicts nothing."""
        self._in_the_way(name, total_bytes, on_disk_bytes, ())

    def _in_the_way(
        self, name: str, total_bytes: int, on_disk_bytes: int, keep: Container[str]
    ) -> list[str]:
        sizes = {other: _size_bytes(self.root / other) for other in self._names() if other != name}
        over_limit = sum(sizes.values()) + total_bytes - self.limit_bytes
        over_disk = total_bytes - on_disk_bytes - shutil.disk_usage(self.root).free
        lacking = max(over_limit, over_disk)
        if lacking <= 0:
            return []  # no need to look at users and times of use
        by_age = [other for other in self.folders() if other in sizes]
        candidates = sorted(by_age, key=lambda other: other in keep)  # stable: by age within
        evictable = [other for other in candidates if not self.is_used(other)]
        still_lacking = lacking - sum(sizes[other] for other in evictable)
        if still_lacking > 0:
            limit = over_limit >= over_disk
            raise StoreFullError(
                f"{total_bytes:,} bytes do not fit into the cache {self.root}: {still_lacking:,} "
                + (
                    f"too many for its limit of {self.limit_bytes:,}; raise the limit"
                    if limit
                    else "more must be free on the disk; free some or put the cache elsewhere"
                ),
                bytes_missing=still_lacking,
            )
        found = []
        for other in evictable:
            if lacking <= 0:
                break
            found.append(other)
            lacking -= sizes[other]
        return found

    def is_used(self, name: str) -> bool:
        """Whether the folder is in use. Called under the root's lock."""
        try:
            with (self.root / name / _LOCK).open("ab", buffering=0) as file:
                return not lock_now(file.fileno())
        except FileNotFoundError:
            return False

    def kept(self) -> list[KeptFolder]:
        """All folders, the least recently used first."""
        return [
            KeptFolder(
                name=name,
                model=_note(self.root / name / _MODEL),
                owner=owner_of(self.root / name),
                nbytes=_allocated_bytes(self.root / name),
                last_used_s=_last_use_ns(self.root / name) / 1e9,
                is_used=self.is_used(name),
            )
            for name in self.folders()
        ]

    def remove_unused(self, names: Collection[str]) -> None:
        """Remove the unused ones of these folders. Ignores missing ones."""
        for name in self.folders():
            if name in names and not self.is_used(name):
                self.discard(name)

    def _empty_trash(self) -> None:
        """Remove folders whose eviction a dead process began."""
        for trash in self.root.glob(f"{_TRASH}*"):
            shutil.rmtree(trash, ignore_errors=True)


def _last_use_ns(folder: Path) -> int:
    """Time of last use; 0 for a folder whose maker died before it had a lock."""
    try:
        return (folder / _LOCK).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def owner_of(folder: Path) -> str | None:
    """Owner of a cache's folder; None if it has none."""
    return (_note(folder / _OWNER) or "").partition(" ")[0] or None


def _note(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_NOTE_BYTES).decode(errors="replace") or None
    except OSError:
        return None


def _allocated_bytes(folder: Path) -> int:
    """Bytes of a folder on disk, without holes in files."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += disk_bytes(path.lstat())
    return total


def _size_bytes(folder: Path) -> int:
    """The room of a folder if it is set, else the sizes of its files, with holes."""
    total = 0
    with os.scandir(folder) as entries:
        for each in entries:
            with contextlib.suppress(FileNotFoundError):  # its writer may be renaming it
                size = each.stat().st_size
                if each.name == _ROOM:
                    return size
                total += size
    return total
