"""The budget of keys and values in a peer's memory and on its disk, divided among sessions."""

from __future__ import annotations

from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from edge.errors import CapacityError, RequestError
from edge.host.free_memory import format_size
from edge.memory.step_memory import (
    cache_token_bytes,
    passing_bytes,
    state_bytes,
    window_bytes,
)
from edge.memory.windows import room_token_bytes
from edge.offload import (
    DiskKVTier,
    KVTier,
    KVTiers,
    MemoryKVTier,
    PrefixMemory,
    PrefixStore,
    StoreError,
)
from edge.protocol.assignment import Assignment
from edge.system.locks import lock
from edge.weights.layout import ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShare:
    """The part of the budget of one session."""

    memory_bytes: int
    disk_bytes: int
    host_bytes: int
    """Host memory of a device with its own memory: the tier that is filled before the disk, and the
    buffer for layers of requests longer than the device's memory."""
    tier: KVTier | None
    """The host's memory and the disk as one tier."""
    host: KVTier | None
    disk: KVTier | None
    prefixes: PrefixStore | None


class KvRoom:
    """The budget of keys and values of a peer. Close it at the end."""

    def __init__(
        self,
        *,
        memory_bytes: int | None,
        disk: tuple[Path, int] | None,
        user_prefix_bytes: int | None = None,
    ) -> None:
        """disk: a folder and its limit in bytes. user_prefix_bytes: the most of them for cached
        prefixes of one device.

        Raises RequestError if the folder cannot be used, or another daemon uses it.
        """
        self._memory_bytes = memory_bytes
        self._folder, self._disk_bytes = disk or (Path(), 0)
        self._shares: list[KvShare] = []
        self._lock = _locked(self._folder) if disk is not None else None
        self.beginnings = PrefixMemory()
        """The prefix cache of ended sessions, in otherwise unused memory."""
        self.prefixes: PrefixStore | None = None
        """The prefix cache on disk, in the room that requests leave."""
        if disk is not None:
            try:
                self.prefixes = PrefixStore(
                    self._folder / "prefixes",
                    self._disk_bytes,
                    owner_limit_bytes=user_prefix_bytes,
                )
            except StoreError as error:
                self.close()
                raise RequestError(str(error)) from error

    @property
    def free_memory_bytes(self) -> int | None:
        """Free bytes for keys and values; None if only the whole memory is limited."""
        if self._memory_bytes is None:
            return None
        return self._memory_bytes - sum(share.memory_bytes for share in self._shares)

    @property
    def free_disk_bytes(self) -> int:
        return self._disk_bytes - sum(share.disk_bytes for share in self._shares)

    def fit(self, unused_bytes: int) -> None:
        """Set the unused memory. The prefix cache gets at most half of it, which leaves some to
        other programs. Evicts any excess before it returns."""
        if self._memory_bytes is not None:
            unused_bytes = min(unused_bytes, self._memory_bytes)
        self.beginnings.limit(unused_bytes // 2)

    def share(
        self, assignment: Assignment, layout: ShardLayout, *, host_bytes: int | None = None
    ) -> KvShare:
        """Reserve a session's part; return it with `give_back`. Raises CapacityError if too little
        is free.

        host_bytes: free host memory of a device with its own memory.
        """
        token_bytes = cache_token_bytes(layout, assignment.kv_dtype)
        limits = assignment.limits
        one_bytes = state_bytes(layout, assignment.kv_dtype)
        of_windows = window_bytes(layout, assignment.kv_dtype)
        room_bytes = room_token_bytes(assignment.model, layout, assignment.kv_dtype)
        memory_bytes = limits.cached_tokens * room_bytes + limits.states * one_bytes
        memory_bytes += limits.windows * of_windows
        disk_bytes = 0
        if limits.disk_tokens:
            fixed_bytes = limits.requests * (one_bytes + of_windows)
            disk_bytes = limits.disk_tokens * token_bytes + fixed_bytes
            disk_bytes = min(disk_bytes, self._disk_bytes)
        free_bytes = self.free_memory_bytes
        if free_bytes is not None and memory_bytes > free_bytes:
            raise CapacityError(
                f"keys and values need {format_size(memory_bytes)}, and {format_size(free_bytes)} "
                "are free for them",
                remedy="give the peer more --kv-memory, or load the model with fewer "
                "context_tokens",
            )
        if disk_bytes > self.free_disk_bytes:
            raise CapacityError(
                f"keys and values need {format_size(disk_bytes)} on disk, and "
                f"{format_size(self.free_disk_bytes)} are free",
                remedy="load the model again",
            )
        passing = 0
        if host_bytes is not None:
            passing = passing_bytes(layout, limits, assignment.kv_dtype)
            if passing > host_bytes:
                raise CapacityError(
                    f"the longest request needs {format_size(passing)} of the host's memory for "
                    f"keys and values on their way to the GPU, and {format_size(host_bytes)} are "
                    "free",
                    remedy="give the peer more --host-memory, or load the model with fewer "
                    "context_tokens",
                )
        tier: KVTier | None = None
        host: KVTier | None = None
        disk: KVTier | None = None
        host_bytes = min((host_bytes or 0) - passing, disk_bytes)
        if limits.disk_tokens and self.prefixes is not None:
            guests = self.prefixes
            tier = disk = DiskKVTier(self._folder, disk_bytes, guests.make_room, guests.give_way)
            if host_bytes:
                host = MemoryKVTier(host_bytes)
                tier = KVTiers(host, disk)
        share = KvShare(
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            host_bytes=passing + (host_bytes if host is not None else 0),
            tier=tier,
            host=host,
            disk=disk,
            prefixes=self.prefixes if tier is not None else None,
        )
        self._shares.append(share)
        return share

    def give_back(self, share: KvShare) -> None:
        """Return the part of a session that is over."""
        self._shares.remove(share)
        if share.tier is not None:
            share.tier.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _locked(folder: Path) -> FileIO:
    """The folder's lock, held while the file is open, so that two daemons do not share its room."""
    try:
        DiskKVTier(folder, 0).close()
        held = (folder / ".lock").open("ab", buffering=0)
    except (OSError, StoreError) as error:
        raise RequestError(str(error)) from error
    try:
        lock(held.fileno())
    except BlockingIOError:
        held.close()
        raise RequestError(
            f"another peer keeps keys and values in {folder}",
            remedy="give each peer its own folder",
        ) from None
    except OSError as error:
        held.close()
        raise RequestError(
            f"{folder} cannot be locked: {error.strerror}",
            remedy="choose one on a disk of this machine",
        ) from error
    return held
