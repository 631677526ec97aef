"""The peer daemon: listens, announces itself and serves connections.

The control plane (Channels, asyncio) goes to `connection.py`. The data plane (Links, one compute
thread for each session) goes to `hosted_shard.py`, for parts of graphs to `hosted_part.py`.
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
from edge.peer.hosted_part import use_name
from edge.peer.resources import PeerResources
from edge.peer.settings import PeerSettings
from edge.protocol.announced_peers import ANNOUNCED
from edge.protocol.assignment import key_of
from edge.protocol.client import map_transport_error, software_difference
from edge.protocol.fields import from_json
from edge.protocol.heartbeat import LINK_TIMEOUT_S
from edge.protocol.key_rotation_push import push_key_rotation
from edge.protocol.link_probe import answer_probe
from edge.protocol.part_runs import HELLO
from edge.transport import Channel, Credentials, Link, Member
from edge.version import __version__

MAX_TOLD = 16
"""Most software versions that the daemon warns about."""

_LOOK_EVERY_S = 0.02

_log = logging.getLogger(__name__)


class PeerDaemon:
    """A daemon: `start`, then `aclose`, which releases everything."""

    def __init__(
        self,
        settings: PeerSettings,
        credentials: Credentials | None,
        id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        """Raises what `PeerResources` raises for invalid settings."""
        self.resources = PeerResources(settings, credentials, id, epoch)
        self._listener: transport.Listener | None = None
        self._discovery: transport.Discovery | None = None
        self._expulsion_sync: ExpulsionSync | None = None
        self._gossip: list[asyncio.Task[None]] = []
        self._told: set[object] = set()

    async def start(self) -> None:
        """Open the back end, listen, then announce.

        Raises NetworkError if the address or an interface cannot be used. Raises RequestError if
        the name cannot be announced or the budget is below the minimum.
        """
        resources = self.resources
        settings, credentials = resources.settings, resources.credentials
        await resources.open()
        hello = {"name": settings.name, "software": __version__}
        # Strangers receive the announcements: they must not identify the device or this start of
        # it. A random id for each: only the address links the two.
        announced = resources.id if credentials is None else uuid.uuid4().hex
        announced_before = uuid.uuid4().hex
        try:
            if settings.announce:
                self._discovery = transport.ZeroconfDiscovery(
                    cluster=settings.cluster,
                    key=None if credentials is None else credentials.tag_key,
                    interfaces=settings.interfaces or None,
                )
                if credentials is not None:  # before the first connection
                    self._expulsion_sync = ExpulsionSync(credentials, self._discovery, hello)
                    self._gossip = [asyncio.create_task(self._expulsion_sync.run())]
            self._listener = await transport.listen(
                settings.listen,
                hello={**hello, "id": resources.id, ANNOUNCED: [announced, announced_before]},
                credentials=credentials,
                on_channel=self._serve,
                on_link=self._take_link,
                on_refused=self._refused,
                link_timeout_s=LINK_TIMEOUT_S,
            )
            resources.listens_at = self._listener.addresses
            _log.info("%s listens on %s", settings.name, ", ".join(resources.addresses))
            if self._discovery is not None:
                record = transport.PeerRecord(
                    id=announced,
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
                        announced=replace(record, id=announced_before),
                    )
                    self._gossip.append(asyncio.create_task(carrying))
        except transport.TransportError as error:
            raise map_transport_error(error, settings.name) from error
        except OSError as error:
            raise NetworkError(f"cannot announce this peer: {error}") from error
        except ValueError as error:
            raise RequestError(f"cannot announce this peer: {error}") from error

    async def leave(self, *, within_s: float) -> None:
        """Stop taking sessions and tell the coordinators. Returns when no session is open, at the
        latest after `within_s`."""
        self.resources.leaving.set()
        self.resources.fit_beginnings()  # cached prefixes will not be used again
        if self.resources.sessions:
            await self._stop_announcing()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.resources.sessions:  # noqa: ASYNC110  connections open and close them
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def aclose(self) -> None:
        """Stop listening and announcing, and end every session. May be called again."""
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
        """Warn the user once that a device with this software version was here."""
        if version not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(version)
            _log.warning("%s", sentence)

    async def _serve(self, channel: Channel) -> None:
        if (difference := software_difference(channel)) is not None:
            self._say_once(str(channel.remote_hello["software"])[:40], difference)
        await Connection(self.resources, channel, lets_in=self._lets_in).run()

    async def _take_link(self, link: Link, hello: Mapping[str, Any]) -> None:
        """Serve a link: a neighbour's of an open session, a coordinator's of a part of a graph, or
        a probe. Any other link is closed."""
        member = hello.get(transport.MEMBER)
        if not await self._lets_in(member):
            link.close()
            return
        if hello.get("probe") is True:
            owner = member.id if isinstance(member, Member) else object()
            async with self.resources.probes_answered.turn(owner):
                await answer_probe(link)
            return
        if HELLO in hello:
            session = hello[HELLO]
            part = self.resources.parts.get(use_name(session)) if isinstance(session, str) else None
            if part is None or not part.offer(link, member):
                link.close()
            return
        try:
            seat, to = (
                (from_json(int, hello.get(stage)), from_json(int, hello.get(rank)))
                for stage, rank in (("stage", "rank"), ("to_stage", "to_rank"))
            )
            key = key_of(from_json(str, hello.get("session")), to)
            hosted = self.resources.sessions.get(key)
        except ProtocolError:
            hosted = None
        if hosted is None or not hosted.offer(seat, link, member):
            link.close()

    async def _lets_in(self, member: Member | None) -> bool:
        if self._expulsion_sync is None or member is None:
            return True
        return await self._expulsion_sync.lets_in(member)
