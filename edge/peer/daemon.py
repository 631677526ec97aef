"""The peer daemon: listens, announces itself, and serves whoever connects.

Where the control plane (Channels, asyncio) meets the data plane (Links, a compute thread for each
session): a coordinator's frames are `connection`'s, a session's links are `hosted_shard`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge import transport
from edge.errors import NetworkError, ProtocolError, RequestError
from edge.peer.connection import Connection
from edge.peer.expulsion_sync import ExpulsionSync
from edge.peer.resources import PeerResources
from edge.peer.settings import PeerSettings
from edge.profiling.link_probe import answer_probe
from edge.protocol.assignment import key_of
from edge.protocol.client import map_transport_error, software_difference
from edge.protocol.fields import integer, text
from edge.protocol.heartbeat import LINK_TIMEOUT_S
from edge.protocol.key_rotation_push import push_key_rotation
from edge.transport import Channel, Credentials, Link, Member
from edge.version import __version__

MAX_TOLD = 16
"""Other versions of which the daemon says that somebody has them."""

_LOOK_EVERY_S = 0.02

_log = logging.getLogger(__name__)


class PeerDaemon:
    """`start`, then `aclose`; everything it made is gone after that."""

    def __init__(
        self,
        settings: PeerSettings,
        credentials: Credentials | None,
        id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        """Raises what `PeerResources` raises for settings that cannot be."""
        self.resources = PeerResources(settings, credentials, id, epoch)
        self._listener: transport.Listener | None = None
        self._discovery: transport.Discovery | None = None
        self._expulsion_sync: ExpulsionSync | None = None
        self._gossip: list[asyncio.Task[None]] = []
        self._told: set[object] = set()

    async def start(self) -> None:
        """Open the back end; listen, then announce.

        Raises NetworkError when the address or an interface cannot be used, RequestError for a
        name that cannot be announced or a budget below the minimum.
        """
        resources = self.resources
        settings, credentials = resources.settings, resources.credentials
        await resources.open()
        hello = {"name": settings.name, "software": __version__}
        try:
            if settings.announce:
                self._discovery = transport.ZeroconfDiscovery(
                    cluster=settings.cluster,
                    key=None if credentials is None else credentials.tag_key,
                    interfaces=settings.interfaces or None,
                )
                if credentials is not None:  # before anybody can come
                    self._expulsion_sync = ExpulsionSync(credentials, self._discovery, hello)
                    self._gossip = [asyncio.create_task(self._expulsion_sync.run())]
            self._listener = await transport.listen(
                settings.listen,
                hello={**hello, "id": resources.id},
                credentials=credentials,
                on_channel=self._serve,
                on_link=self._take_link,
                on_refused=self._refused,
                link_timeout_s=LINK_TIMEOUT_S,
            )
            resources.listens_at = self._listener.addresses
            _log.info("%s listens on %s", settings.name, ", ".join(resources.addresses))
            if self._discovery is not None:
                # Strangers hear it: nothing in it tells this device, or this start, from another.
                record = transport.PeerRecord(
                    id=resources.id if credentials is None else uuid.uuid4().hex,
                    name=settings.name if credentials is None else "",
                    cluster=settings.cluster,
                    addresses=self._listener.addresses,
                    protocol=transport.PROTOCOL_VERSION,
                    properties={},
                )
                await self._discovery.announce(record)
                if credentials is not None:
                    carrying = push_key_rotation(
                        credentials,
                        settings.cluster,
                        settings.interfaces or None,
                        # Nothing tells that the two are of one device but the address.
                        announced=replace(record, id=uuid.uuid4().hex),
                    )
                    self._gossip.append(asyncio.create_task(carrying))
        except transport.TransportError as error:
            raise map_transport_error(error, settings.name) from error
        except OSError as error:
            raise NetworkError(f"cannot announce this peer: {error}") from error
        except ValueError as error:
            raise RequestError(f"cannot announce this peer: {error}") from error

    async def leave(self, *, within_s: float) -> None:
        """Tell every coordinator, take no new session; return once none is open, or after that
        long. At once where none is."""
        self.resources.leaving.set()
        self.resources.fit_beginnings()  # nobody comes for them
        if self.resources.sessions:
            await self._stop_announcing()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.resources.sessions:  # noqa: ASYNC110  connections open and close them
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def aclose(self) -> None:
        """Stop listening and announcing, end every session. May be called again."""
        await self._stop_announcing()
        if self._listener is not None:
            await self._listener.aclose()
            _log.info("%s ends", self.resources.settings.name)
        await self.resources.aclose()

    async def _stop_announcing(self) -> None:
        for task in self._gossip:
            task.cancel()
        await asyncio.gather(*self._gossip, return_exceptions=True)
        self._gossip.clear()
        if self._discovery is not None:
            await self._discovery.aclose()
            self._discovery = None

    def _refused(self, _peer: str, error: transport.TransportError) -> None:
        if isinstance(error, transport.VersionMismatchError):
            self._say_once(error.theirs, str(error))

    def _say_once(self, version: object, sentence: str) -> None:
        """To whoever runs this daemon: somebody of this version was here."""
        if version not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(version)
            _log.warning("%s", sentence)

    async def _serve(self, channel: Channel) -> None:
        if (difference := software_difference(channel)) is not None:
            self._say_once(str(channel.remote_hello["software"])[:40], difference)
        await Connection(self.resources, channel, lets_in=self._lets_in).run()

    async def _take_link(self, link: Link, hello: Mapping[str, Any]) -> None:
        """A neighbour's link for one of our sessions, or a probe; anything else is closed."""
        member = hello.get(transport.MEMBER)
        if not await self._lets_in(member):
            link.close()
            return
        if hello.get("probe") is True:
            owner = member.id if isinstance(member, Member) else object()
            async with self.resources.probes_answered.turn(owner):
                await answer_probe(link)
            return
        try:
            seat = (integer(hello.get("stage"), "stage"), integer(hello.get("rank"), "rank"))
            to = (integer(hello.get("to_stage"), "stage"), integer(hello.get("to_rank"), "rank"))
            key = key_of(text(hello.get("session"), "session"), to)
            hosted = self.resources.sessions.get(key)
        except ProtocolError:
            hosted = None
        if hosted is None or not hosted.offer(seat, link, member):
            link.close()

    async def _lets_in(self, member: Member | None) -> bool:
        return self._expulsion_sync is None or member is None or await self._news.lets_in(member)
