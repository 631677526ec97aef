"""The peer daemon: listens, announces itself, keeps shards on disk and runs them.

Where the control plane (Channels, asyncio) meets the data plane (Links, a compute thread for each
session): a coordinator's frames are `conversation`'s, a session's links are `hosted_session`'s.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offload
import transport
from edge import __version__
from edge.addresses import reachable
from edge.backends.base import Backend, open_backend
from edge.client import map_transport_error
from edge.conversation import Conversation
from edge.errors import NetworkError, ProtocolError, RequestError
from edge.host import device_identity, host_id
from edge.hosted_session import LINK_TIMEOUT_S, HostedSession
from edge.kv_room import KvRoom
from edge.link_probe import answer_probe
from edge.memory import format_size
from edge.profile_sample import SAMPLE_BYTES, sample_budget_bytes
from edge.wire import integer, text
from offload import DerivedCache, ShardCache
from transport import Channel, Link

MAX_PROBES = 4
"""Links that are answered at once; further ones wait, or are given up by who made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How one daemon runs."""

    name: str
    listen: str
    threads: int
    memory_bytes: int
    cluster: str
    announce: bool
    interfaces: tuple[str, ...] | None
    cache_root: Path
    cache_limit_bytes: int
    kv_memory_bytes: int | None = None
    """Of `memory_bytes`, for keys and values; None: what plans reserve."""
    kv_disk: tuple[Path, int] | None = None
    """Folder and bytes for keys and values beyond that."""
    backend: str = "ort"
    processor: str = "CPU"
    """What computes, for people."""


class PeerNode:
    """One daemon. `start`, then `aclose`; everything it made is gone after that."""

    def __init__(self, settings: PeerSettings) -> None:
        """Raises RequestError when the cache, or the folder for keys and values, cannot be used, or
        these may take more memory than there is."""
        kv_bytes = settings.kv_memory_bytes or 0
        if kv_bytes > settings.memory_bytes:
            raise RequestError(
                f"--kv-memory {format_size(kv_bytes)} is a part of the memory, which is "
                f"{format_size(settings.memory_bytes)}; give less, or more --memory"
            )
        self.settings = settings
        self.id = uuid.uuid4().hex
        self.sessions: dict[str, HostedSession] = {}
        self.measurement = asyncio.Lock()
        """Held while the device is measured: two at once would measure each other."""
        self.disk_bytes_per_s: float | None = None
        self._probes = asyncio.Semaphore(MAX_PROBES)
        try:
            self.cache = ShardCache(settings.cache_root / "shards", settings.cache_limit_bytes)
            self.packed = DerivedCache(settings.cache_root / "packed", settings.cache_limit_bytes)
        except offload.StoreError as error:
            raise RequestError(str(error)) from error
        self.kv_room = KvRoom(memory_bytes=settings.kv_memory_bytes, disk=settings.kv_disk)
        self._backend: Backend | None = None
        self._backend_mutex = threading.Lock()
        self._listener: transport.Listener | None = None
        self._discovery: transport.Discovery | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this peer: addresses of interfaces, never 0.0.0.0."""
        assert self._listener is not None
        return reachable(self._listener.addresses, interfaces=self.settings.interfaces)

    @property
    def free_bytes(self) -> int:
        """What a coordinator may still reserve."""
        reserved = sum(hosted.reserved_bytes for hosted in self.sessions.values())
        return max(0, self.settings.memory_bytes - reserved)

    def backend(self) -> Backend:
        """What computes here; opened at its first use, which takes a moment. From any thread."""
        with self._backend_mutex:
            if self._backend is None:
                self._backend = open_backend(self.settings.backend, threads=self.settings.threads)
            return self._backend

    async def start(self) -> None:
        """Listen, then announce.

        Raises NetworkError when the address or an interface cannot be used, RequestError for a
        name that cannot be announced.
        """
        try:
            self._listener = await transport.listen(
                self.settings.listen,
                hello={"name": self.settings.name, "id": self.id, "software": __version__},
                on_channel=self._serve,
                on_link=self._take_link,
                link_timeout_s=LINK_TIMEOUT_S,
            )
            if self.settings.announce:
                self._discovery = transport.ZeroconfDiscovery(
                    cluster=self.settings.cluster, interfaces=self.settings.interfaces
                )
                await self._discovery.announce(
                    transport.PeerRecord(
                        id=self.id,
                        name=self.settings.name,
                        cluster=self.settings.cluster,
                        addresses=self._listener.addresses,
                        protocol=transport.PROTOCOL_VERSION,
                        properties={},
                    )
                )
        except transport.TransportError as error:
            raise map_transport_error(error, self.settings.name) from error
        except OSError as error:
            raise NetworkError(f"cannot announce this peer: {error}") from error
        except ValueError as error:
            raise RequestError(f"cannot announce this peer: {error}") from error

    async def aclose(self) -> None:
        """Stop listening and announcing, end every session. May be called again."""
        if self._discovery is not None:
            await self._discovery.aclose()
        if self._listener is not None:
            await self._listener.aclose()
        self.kv_room.close()

    def describe(self) -> dict[str, Any]:
        """This peer for a coordinator: who it is, what it has, what it runs."""
        settings = self.settings
        sample_bytes = min(2 * SAMPLE_BYTES, sample_budget_bytes(settings.memory_bytes))
        return {
            "id": self.id,
            "name": self.settings.name,
            "software": __version__,
            "addresses": list(self.addresses),
            "device": {
                "backend": self.settings.backend,
                "processor": self.settings.processor,
                "threads": self.settings.threads,
                "memory_bytes": self.settings.memory_bytes,
                "free_bytes": self.free_bytes,
                "kv_memory_bytes": self.kv_room.free_memory_bytes,
                "kv_disk_bytes": self.kv_room.free_disk_bytes,
                "kv_prefix_bytes": self.kv_room.prefixes.used_bytes if self.kv_room.prefixes else 0,
                "host": host_id(),
                "identity": device_identity(
                    backend=settings.backend,
                    accelerator=settings.processor,
                    threads=settings.threads,
                    sample_bytes=sample_bytes,
                ),
            },
            "models": [
                {
                    "name": hosted.assignment.plan.model,
                    "dtype": hosted.assignment.weight_format.name,
                    "stage": hosted.assignment.stage,
                    "rank": hosted.assignment.rank,
                    "bytes": hosted.reserved_bytes,
                    "kv_bytes": hosted.kv.memory_bytes,
                    "kv_disk_bytes": hosted.kv.tier.used_bytes if hosted.kv.tier else 0,
                }
                for hosted in self.sessions.values()
            ],
        }

    async def _serve(self, channel: Channel) -> None:
        await Conversation(self, channel).run()

    async def _take_link(self, link: Link, hello: Mapping[str, Any]) -> None:
        """A neighbour's link for one of our sessions, or a probe; anything else is closed."""
        if hello.get("probe") is True:
            async with self._probes:
                await answer_probe(link)
            return
        try:
            hosted = self.sessions.get(text(hello, "session"))
            seat = (integer(hello, "stage"), integer(hello, "rank"))
        except ProtocolError:
            hosted = None
        if hosted is None or not hosted.offer(seat, link):
            link.close()
