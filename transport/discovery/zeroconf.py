"""Discovery over the local network by multicast DNS, without any server.

Knows zeroconf; what its records mean is in ``zeroconf_record``, who is there is in ``peers``.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from zeroconf import Error, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from edge.transport.discovery.peers import MAX_PEERS, PeerEvent, PeerRecord, check_cluster
from edge.transport.discovery.watchers import Watchers
from edge.transport.discovery.zeroconf_record import (
    SERVICE_TYPE,
    interface_addresses,
    record_of,
    services_of,
)
from edge.transport.errors import AddressError, ChannelClosedError

_log = logging.getLogger(__name__)

_LOOK_UP_TIMEOUT_MS = 3000
_LOOK_UPS = 3
"""A packet may get lost more than once on a busy radio."""

INTERFACES_EVERY_S = 5.0
"""How often it is seen whether this device has got another address, or joined another network."""


class ZeroconfDiscovery:
    """Discovery by zeroconf within one cluster. See :class:`Discovery`.

    Nothing is opened before the first ``announce`` or ``watch``. A peer that leaves says so and is
    gone at once; one that dies without a word is gone when its record expires, which takes minutes:
    whoever is connected to it learns earlier. When this device gets another address, its peers are
    announced anew and others are looked for there.
    """

    def __init__(
        self,
        *,
        cluster: str = "default",
        key: bytes | None = None,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        """``interfaces`` are names or IPv4 addresses; without them, all but loopback.

        With a ``key`` the cluster is announced as a tag, by which others who have the key know it
        again; it says nothing to anybody else, and differs with each id. It covers all that is
        announced, so that nobody else can make a peer of the cluster of it, or lead to another
        address by it.
        """
        self._cluster = cluster
        self._key = key
        self._interfaces = None if interfaces is None else tuple(interfaces)
        self._watchers = Watchers()
        self._records: dict[str, PeerRecord] = {}
        """Own ones, by their ids."""
        self._own: dict[str, dict[str, AsyncServiceInfo]] = {}
        self._own_services: set[str] = set()
        self._telling: dict[str, asyncio.Future[None]] = {}
        """What is told again, since packets get lost; by the service."""
        self._look_ups: dict[str, asyncio.Task[None]] = {}
        self._zeroconf: AsyncZeroconf | None = None
        self._addresses: tuple[str, ...] = ()
        """Addresses of this device on which it is open."""
        self._following: asyncio.Task[None] | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._changing = asyncio.Lock()
        self._is_closed = False

    async def announce(self, record: PeerRecord) -> None:
        """See :class:`Discovery`. Returns when it was told for the first time, of three.

        Nobody is asked first whether they have that id, which takes more than a second: ids are
        random numbers. So nobody can keep a peer from announcing itself either.
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
                raise AddressError(
                    f"cannot announce peer '{record.name}' by {self.describe()}: {error}"
                ) from error
            self._records[record.id] = record

    async def _tell(
        self, zeroconf: AsyncZeroconf, id: str, services: Sequence[AsyncServiceInfo]
    ) -> None:
        """Announce these of an own peer, in place of what was announced of it."""
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
        await asyncio.sleep(0)  # in which each is told

    async def watch(self) -> AsyncIterator[PeerEvent]:
        if self._browser is None and not self._is_closed:
            self._browser = self._browsing(self._open())
        async for event in self._watchers.watch():
            yield event

    async def aclose(self) -> None:
        """See :class:`Discovery`. Takes a moment: goodbyes are said three times."""
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
                self._stop_telling(name)  # nothing comes after the goodbyes
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
                self._zeroconf = AsyncZeroconf(interfaces=list(self._addresses))
            except (Error, OSError) as error:
                raise AddressError(
                    f"cannot use {self.describe()}: {error}; check that the interface is up and "
                    "that multicast DNS (UDP port 5353) is allowed"
                ) from error
            self._following = asyncio.get_running_loop().create_task(self._follow_addresses())
        return self._zeroconf

    def _browsing(self, zeroconf: AsyncZeroconf) -> AsyncServiceBrowser:
        """Asks at once, everywhere, who is there."""
        return AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_change])

    async def _follow_addresses(self) -> None:
        """While it is open, be open on the addresses that this device has."""
        while True:
            await asyncio.sleep(INTERFACES_EVERY_S)
            with contextlib.suppress(AddressError):  # no such interface, for now
                addresses = interface_addresses(self._interfaces)
                if addresses and addresses != self._addresses:
                    async with self._changing:
                        await self._move(addresses)

    async def _move(self, addresses: tuple[str, ...]) -> None:
        zeroconf = self._zeroconf
        assert zeroconf is not None
        try:
            await zeroconf.async_update_interfaces(list(addresses))
            for record in self._records.values():
                services = services_of(record, addresses, self._key)
                await self._tell(zeroconf, record.id, services)
        except (Error, OSError) as error:  # networks come and go: the next look finds the next
            _log.info("cannot use the addresses that this device has now: %s", error)
            return
        self._addresses = addresses
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = self._browsing(zeroconf)

    def _on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Called by the browser, in the event loop; the names are the browser's."""
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
        """Ask for the rest of a service's records and take note of the peer behind it."""
        try:
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            for _ in range(_LOOK_UPS):
                if await info.async_request(zeroconf, _LOOK_UP_TIMEOUT_MS):
                    break
            else:
                return
            record = record_of(name, info.properties, self._cluster, self._key)
        except (Error, ValueError):
            return  # What a stranger sent cannot even be read: it is not one of ours.
        if record is None:
            self._watchers.lost(name)  # It may have been one of ours before it changed.
        else:
            self._watchers.seen(name, record)
