"""Folders under one root that several processes share: locks and eviction.

Two kinds of lock, both `flock`, which the kernel frees when a process dies. The root's lock is held
for moments, to make, open or remove a folder. A folder's lock is shared and held for as long as the
folder is in use; only a folder without a holder is evicted. Knows nothing of the folders' contents.
"""

import contextlib
import fcntl
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

_LOCK = ".lock"
_TRASH = ".trash-"
_OWNER = ".owner"
"""Owner of the folder, and the bytes that it may take in the end."""
_MODEL = ".model"
"""The name of the model that the folder is of, for people."""
_MOST_NOTE_BYTES = 2000
_ROOM = ".room"
"""A file as large as what its folder may take, while that is not all written."""


class FolderUse(Closing):
    """A folder that is not evicted until `close`; also a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = (folder / _LOCK).open("ab", buffering=0)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mark_used(self._lock.fileno())
        except BaseException:
            self._lock.close()
            raise

    def note_model_of(self, other: Path) -> None:
        """The folder is made of another one, of the same model."""
        with contextlib.suppress(OSError):
            shutil.copyfile(other / _MODEL, self.folder / _MODEL)

    def close(self) -> None:
        """The folder was last used now, and may be evicted from now on."""
        if not self._lock.closed:
            mark_used(self._lock.fileno())
            self._lock.close()


def note_model(folder: Path, model: str) -> None:
    """Remember the name of the model that a cache's folder is of, if it is news."""
    model = model[: _MOST_NOTE_BYTES // 4].encode(errors="replace").decode()
    if model != _note(folder / _MODEL):
        with contextlib.suppress(OSError):
            (folder / _MODEL).write_text(model, encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFolder:
    """A folder of a cache, as its user may want to know of it."""

    name: str
    model: str | None
    """Its name; None if unknown."""
    owner: str | None
    nbytes: int
    """That it takes on the disk."""
    last_used_s: float
    """Since the epoch."""
    is_used: bool


class FolderCache:
    """At most `limit_bytes` in folders under `root`, the least recently used evicted first."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Raises StoreError if `root` cannot be made or written."""
        self.root = root
        self.limit_bytes = limit_bytes
        with self.locked():
            self._empty_trash()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Waits for the root's lock. All but `folders` is called within.

        A root that was removed meanwhile is made again. Raises StoreError where the disk or the
        folder fails, also within.
        """
        with disk_errors_as_store_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (self.root / _LOCK).open("ab", buffering=0) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    def folders(self) -> list[str]:
        """The names of all folders, the least recently used first."""
        return sorted(self._names(), key=lambda name: (_last_use_ns(self.root / name), name))

    def _names(self) -> list[str]:
        with os.scandir(self.root) as entries:
            return [each.name for each in entries if each.name[0] != "." and each.is_dir()]

    def use(self, name: str) -> FolderUse:
        """Keeps the folder from eviction; makes it if it is not there."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        return FolderUse(folder)

    def discard(self, name: str) -> None:
        """Removes a folder, used or not; what others hold open stays readable to them."""
        trash = self.root / f"{_TRASH}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            (self.root / name).rename(trash)  # at once: no process finds half a folder
            shutil.rmtree(trash, ignore_errors=True)

    def room_bytes(self, name: str) -> int:
        """What the folder may take, as long as that is not all written; 0 where nothing is said."""
        try:
            return (self.root / name / _ROOM).stat().st_size
        except FileNotFoundError:
            return 0

    def set_room(self, name: str, total_bytes: int | None) -> None:
        """Count the folder as `total_bytes` from now on. None: as the size of its files."""
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
        """Evicts the owner's other folders until it may have `name`, too, of that size.

        Raises StoreFullError, evicting nothing, where they are in use.
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
        """The same, as far as they are not in use: `name` may take the owner over its limit."""
        going, _ = self._others_of(owner, limit_bytes, name, total_bytes)
        for other in going:
            self.discard(other)

    def _others_of(
        self, owner: str, limit_bytes: int, name: str, total_bytes: int
    ) -> tuple[list[str], int]:
        """Which of the owner's folders go for `name`, the least recently used first, and how much
        is lacking even then."""
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
        """0 for another's folder."""
        try:
            whose, _, size = (self.root / name / _OWNER).read_text().partition(" ")
            return int(size) if whose == owner else 0
        except (OSError, ValueError):
            return 0

    def make_room(
        self, name: str, total_bytes: int, *, on_disk_bytes: int = 0, keep: Container[str] = ()
    ) -> None:
        """Evicts other folders until `name` may grow to `total_bytes`.

        `on_disk_bytes` of them it has already. Folders in `keep` go last. Raises StoreFullError
        if neither the limit nor the disk has room even then, evicting nothing.
        """
        for other in self._in_the_way(name, total_bytes, on_disk_bytes, keep):
            self.discard(other)

    def check_room(self, name: str, total_bytes: int, *, on_disk_bytes: int = 0) -> None:
        """The same check; evicts nothing."""
        self._in_the_way(name, total_bytes, on_disk_bytes, ())

    def _in_the_way(
        self, name: str, total_bytes: int, on_disk_bytes: int, keep: Container[str]
    ) -> list[str]:
        sizes = {other: _size_bytes(self.root / other) for other in self._names() if other != name}
        over_limit = sum(sizes.values()) + total_bytes - self.limit_bytes
        over_disk = total_bytes - on_disk_bytes - shutil.disk_usage(self.root).free
        lacking = max(over_limit, over_disk)
        if lacking <= 0:
            return []  # users and times of use do not matter
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
            with (self.root / name / _LOCK).open("ab", buffering=0) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
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
        """The unused ones of them; missing ones are no error."""
        for name in self.folders():
            if name in names and not self.is_used(name):
                self.discard(name)

    def _empty_trash(self) -> None:
        """Remove folders of a process that died while it evicted."""
        for trash in self.root.glob(f"{_TRASH}*"):
            shutil.rmtree(trash, ignore_errors=True)


def _last_use_ns(folder: Path) -> int:
    """0, the oldest, for a folder whose maker died before it had a lock."""
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
    """Bytes on disk; of files with holes, what is written."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def _size_bytes(folder: Path) -> int:
    """What it may take, where that is said, else full sizes, also of files with holes."""
    total = 0
    with os.scandir(folder) as entries:
        for each in entries:
            with contextlib.suppress(FileNotFoundError):  # its user may just be renaming it
                size = each.stat().st_size
                if each.name == _ROOM:
                    return size
                total += size
    return total
