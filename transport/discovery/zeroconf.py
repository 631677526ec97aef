"""Discovery on the local network by multicast DNS (zeroconf), without a server.

Knows zeroconf. ``zeroconf_record`` reads its records; ``peers`` merges them.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from zeroconf import (
    DNSQuestionType,
    Error,
    IPVersion,
    NotRunningException,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from edge.transport.discovery.peers import (
    MAX_ADDRESSES,
    MAX_PEERS,
    PeerEvent,
    PeerRecord,
    check_cluster,
)
from edge.transport.discovery.watchers import Watchers
from edge.transport.discovery.zeroconf_record import (
    SERVICE_TYPE,
    interface_addresses,
    multicast_places,
    record_of,
    services_of,
)
from edge.transport.errors import AddressError, ChannelClosedError
from edge.transport.network_interfaces import with_scopes

_log = logging.getLogger(__name__)


def _without_traceback(record: logging.LogRecord) -> bool:
    """A filter that takes tracebacks from what zeroconf logs: of a network that went, for one."""
    record.exc_info = None
    return True


logging.getLogger("zeroconf").addFilter(_without_traceback)

_LOOK_UP_TIMEOUT_MS = 3000
_LOOK_UPS = 3
"""Attempts: a packet may get lost more than once on a busy radio."""

_ASKED = DNSQuestionType.QM
"""Answers come by multicast. One to a single address would reach only one of the processes that
share the port on this device, as a peer and a search do (RFC 6762, section 15.1)."""

INTERFACES_EVERY_S = 5.0
"""Seconds between two checks for a changed address or network of this device."""


class ZeroconfDiscovery:
    """Discovery by zeroconf within one cluster. See :class:`Discovery`.

    Nothing is opened before the first ``announce`` or ``watch``. A peer that leaves says goodbye
    and is gone at once. One that dies is gone when its record expires, after minutes; its
    connections fail earlier. When this device gets another address, its peers are announced anew,
    and others are searched there.
    """

    def __init__(
        self,
        *,
        cluster: str = "default",
        key: bytes | None = None,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        """``interfaces``: names or addresses; None: all but loopback.

        ``key``: the cluster is announced as a tag, which only holders of the key recognise. The tag
        differs with each id and covers the whole announcement, so that nobody else can announce a
        peer of the cluster, or change its addresses.
        """
        self._cluster = cluster
        self._key = key
        self._interfaces = None if interfaces is None else tuple(interfaces)
        self._watchers = Watchers()
        self._records: dict[str, PeerRecord] = {}
        """Own records by id."""
        self._own: dict[str, dict[str, AsyncServiceInfo]] = {}
        self._own_services: set[str] = set()
        self._telling: dict[str, asyncio.Future[None]] = {}
        """Repeated announcements by service, since packets get lost."""
        self._look_ups: dict[str, asyncio.Task[None]] = {}
        self._zeroconf: AsyncZeroconf | None = None
        self._addresses: tuple[str, ...] = ()
        """Addresses of this device on which it is open."""
        self._following: asyncio.Task[None] | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._changing = asyncio.Lock()
        self._is_closed = False

    async def announce(self, record: PeerRecord) -> None:
        """See :class:`Discovery`. Returns after the first of three announcements.

        There is no probing for conflicts, which takes more than a second: ids are random. So nobody
        can keep a peer from announcing itself either.
        """
        check_cluster(record, self._cluster)
        async with self._changing:
            if self._is_closed:
                raise ChannelClosedError("the discovery was closed")
            zeroconf = self._open()
            services = services_of(record, self._addresses, self._key)
            try:
                await self._tell(zeroconf, record.id, services)
            except (Error, OSError) as error:
                why: object = error
                if isinstance(error, NotRunningException):  # which has no text
                    why = "this device was too busy to begin in time; start it again"
                raise AddressError(
                    f"cannot announce peer '{record.name}' by {self.describe()}: {why}"
                ) from error
            self._records[record.id] = record

    async def _tell(
        self, zeroconf: AsyncZeroconf, id: str, services: Sequence[AsyncServiceInfo]
    ) -> None:
        """Announce these services of an own peer, in place of earlier ones."""
        wanted = {service.name: service for service in services}
        present = self._own.get(id, {})
        for name in present.keys() - wanted.keys():
            self._stop_telling(name)
            await (await zeroconf.async_unregister_service(present.pop(name)))
        for name, service in wanted.items():
            self._own_services.add(name)
            if name in present:
                telling = await zeroconf.async_update_service(service)
            else:
                telling = await zeroconf.async_register_service(
                    service, cooperating_responders=True
                )
            self._own.setdefault(id, {})[name] = service
            self._stop_telling(name)
            self._telling[name] = asyncio.ensure_future(telling)
        await asyncio.sleep(0)  # each announcement runs in its own task

    async def watch(self) -> AsyncIterator[PeerEvent]:
        if self._browser is None and not self._is_closed:
            self._browser = self._browsing(self._open())
        async for event in self._watchers.watch():
            yield event

    async def aclose(self) -> None:
        """See :class:`Discovery`. Takes a moment: goodbyes are sent three times."""
        self._is_closed = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        async with self._changing:
            browser, self._browser = self._browser, None
            zeroconf, self._zeroconf = self._zeroconf, None
            if browser is not None:
                await browser.async_cancel()
            look_ups = list(self._look_ups.values())
            for look_up in look_ups:
                look_up.cancel()
            await asyncio.gather(*look_ups, return_exceptions=True)
            self._watchers.close()
            for name in list(self._telling):
                self._stop_telling(name)  # nothing is sent after the goodbyes
            if zeroconf is not None:
                await zeroconf.async_close()

    def describe(self) -> str:
        where = "all interfaces" if self._interfaces is None else ", ".join(self._interfaces)
        return f"zeroconf (multicast DNS) on {where}, cluster '{self._cluster}'"

    def _stop_telling(self, name: str) -> None:
        if name in self._telling:
            self._telling.pop(name).cancel()

    def _open(self) -> AsyncZeroconf:
        if self._zeroconf is None:
            self._addresses = interface_addresses(self._interfaces)
            try:
                self._zeroconf = AsyncZeroconf(interfaces=multicast_places(self._addresses))
            except (Error, OSError) as error:
                raise AddressError(
                    f"cannot use {self.describe()}: {error}; check that the interface is up and "
                    "that multicast DNS (UDP port 5353) is allowed"
                ) from error
            self._following = asyncio.get_running_loop().create_task(self._follow_addresses())
        return self._zeroconf

    def _browsing(self, zeroconf: AsyncZeroconf) -> AsyncServiceBrowser:
        """Start a query on all interfaces."""
        return AsyncServiceBrowser(
            zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_change], question_type=_ASKED
        )

    async def _follow_addresses(self) -> None:
        """While open, follow changes of this device's addresses."""
        while True:
            await asyncio.sleep(INTERFACES_EVERY_S)
            with contextlib.suppress(AddressError):  # no such interface at the moment
                addresses = interface_addresses(self._interfaces)
                if addresses and _announced(addresses) != _announced(self._addresses):
                    async with self._changing:
                        await self._move(addresses)

    async def _move(self, addresses: tuple[str, ...]) -> None:
        zeroconf = self._zeroconf
        assert zeroconf is not None
        try:
            places = multicast_places(addresses)
            await zeroconf.async_update_interfaces(places, ip_version=IPVersion.All)
            for record in self._records.values():
                services = services_of(record, addresses, self._key)
                await self._tell(zeroconf, record.id, services)
        except (Error, OSError) as error:  # networks come and go: the next check repairs it
            _log.info("cannot use the addresses that this device has now: %s", error)
            return
        self._addresses = addresses
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = self._browsing(zeroconf)

    def _on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Called by the browser, in the event loop; the parameter names are zeroconf's."""
        if name in self._own_services:
            return
        outdated = self._look_ups.pop(name, None)
        if outdated is not None:
            outdated.cancel()
        if state_change is ServiceStateChange.Removed:
            self._watchers.lost(name)
        elif len(self._look_ups) < MAX_PEERS and not self._is_closed:
            task = asyncio.get_running_loop().create_task(self._look_up(zeroconf, name))
            self._look_ups[name] = task
            task.add_done_callback(lambda done: self._forget(name, done))

    def _forget(self, name: str, done: asyncio.Task[None]) -> None:
        if self._look_ups.get(name) is done:
            del self._look_ups[name]

    async def _look_up(self, zeroconf: Zeroconf, name: str) -> None:
        """Query the rest of a service's records and note its peer."""
        try:
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            for _ in range(_LOOK_UPS):
                if await info.async_request(zeroconf, _LOOK_UP_TIMEOUT_MS, _ASKED):
                    break
            else:
                return
            record = record_of(name, info.properties, self._cluster, self._key)
            if record is not None:
                record = replace(record, addresses=with_scopes(record.addresses, _scopes(info)))
        except (Error, ValueError):
            return  # Unreadable: it comes from a stranger.
        if record is None:
            self._watchers.lost(name)  # It may have been a peer before it changed.
        else:
            self._watchers.seen(name, record)


def _scopes(info: AsyncServiceInfo) -> dict[str, list[str]]:
    """The interfaces of this device on which a service's link-local addresses were told."""
    found: dict[str, list[str]] = {}
    for address in info.parsed_scoped_addresses(IPVersion.V6Only):
        number, _, scope = address.partition("%")
        if scope.isdecimal():
            with contextlib.suppress(OSError):  # it has just gone
                found.setdefault(number, []).append(socket.if_indextoname(int(scope)))
    return found


def _announced(addresses: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """What is used of a device's addresses: all, and those announced. Their order changes more
    often, as with each container that starts."""
    return frozenset(addresses), frozenset(addresses[:MAX_ADDRESSES])
