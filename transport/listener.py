"""The listener: accepts connections and makes channels and links of them.

A connection is a stranger's until its handshake is done. A slow, wrong or hostile stranger must
cost other peers nothing.
"""

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.transport.address import SocketAddress, describe, format_address, resolve
from edge.transport.async_socket import AsyncSocket, watch_for_death
from edge.transport.channel import Channel
from edge.transport.credentials import Credentials, Member
from edge.transport.errors import AddressError, PeerLostError, RefusedError, TransportError
from edge.transport.handshake import MEMBER, Role, answer, display_name, encode_hello
from edge.transport.link import Link
from edge.transport.records import records_of
from edge.transport.sealed_socket import after_handshake
from edge.transport.tcp_channel import DEATH_NOTICED_WITHIN_S, TcpChannel
from edge.transport.tcp_link import TcpLink

HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds for a handshake: three small messages each way, also over a slow radio."""

MAX_UNFINISHED_HANDSHAKES = 64
"""Most unfinished handshakes; for one more, an old one is dropped. If more than half have shown a
tag, which only members can make, it is one of those; otherwise one of the rest. Among these it is
the oldest from the address that has most. An honest peer finishes in milliseconds, so slow ones
cannot keep the places. One address does not push out others, and strangers do not push out members,
whose longest part comes after the tag."""

MAX_CONNECTIONS = 512
"""Most connections served at once, of all peers; and of one device:"""
MAX_CONNECTIONS_OF_ONE = 128

_ACCEPT_RETRY_S = 0.2
_LOG_EVERY_S = 60.0
"""Seconds between two lines about connections that cannot be accepted."""
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_MOST_PORTS = 8
"""Free ports that are tried where one is wanted for several addresses: it may be free on one only.
"""
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}

OnChannel = Callable[[Channel], Awaitable[None]]
OnLink = Callable[[Link, Mapping[str, Any]], Awaitable[None]]
OnRefused = Callable[[str, TransportError], None]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stranger:
    """A connection before its handshake is done."""

    connection: AsyncSocket
    host: str
    has_tag: bool = False

    def show_tag(self) -> None:
        self.has_tag = True


class Listener:
    """Bound sockets and the tasks that serve what comes in. Made by :func:`listen`."""

    def __init__(
        self,
        sockets: list[socket.socket],
        *,
        hello: Mapping[str, Any],
        credentials: Credentials | None,
        on_channel: OnChannel,
        on_link: OnLink,
        on_refused: OnRefused | None,
        link_timeout_s: float,
        handshake_timeout_s: float,
        max_unfinished_handshakes: int,
    ) -> None:
        self._sockets = sockets
        self._hello = hello
        self._credentials = credentials
        self._on_channel = on_channel
        self._on_link = on_link
        self._on_refused = on_refused
        self._link_timeout_s = link_timeout_s
        self._handshake_timeout_s = handshake_timeout_s
        self._max_unfinished_handshakes = max_unfinished_handshakes
        self.addresses = tuple(format_address(*bound.getsockname()[:2]) for bound in sockets)
        """``host:port`` of each bound socket; a wildcard host stays one."""
        self.port = int(sockets[0].getsockname()[1])
        """The port, the same on every address."""
        # In order of age: the first entry is the oldest handshake.
        self._unfinished: dict[asyncio.Task[None], _Stranger] = {}
        self._serving: dict[asyncio.Task[None], object] = {}
        """The owner of each task."""
        self._dropped: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logs_from_s = 0.0
        for bound in sockets:
            self._loop.add_reader(bound, self._accept, bound)

    async def aclose(self) -> None:
        """Stop listening, cancel what is being served and wait for it. May be called again.

        Channels and links that their handlers kept open after returning are not touched.
        """
        for bound in self._sockets:
            self._loop.remove_reader(bound)
            bound.close()
        self._sockets = []
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        # The caller may be a handler, and a task cannot wait for itself.
        tasks = {*self._unfinished, *self._serving, *self._dropped} - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, bound: socket.socket) -> None:
        try:
            connected, place = bound.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                # The connection stays in the queue and would wake us again at once.
                if self._loop.time() >= self._logs_from_s:
                    self._logs_from_s = self._loop.time() + _LOG_EVERY_S
                    _log.warning("cannot accept connections for a moment: %s", describe(error))
                self._loop.remove_reader(bound)
                self._retries[bound] = self._loop.call_later(_ACCEPT_RETRY_S, self._resume, bound)
            return
        try:
            watch_for_death(connected, within_s=DEATH_NOTICED_WITHIN_S)
            connection = AsyncSocket(connected, format_address(*place[:2]))
        except OSError:
            connected.close()  # It was reset before it could be read.
            return
        if len(self._unfinished) >= self._max_unfinished_handshakes:
            self._drop_one()
        stranger = _Stranger(connection, place[0])
        task = self._loop.create_task(self._serve(stranger), name=f"edge {connection.peer}")
        self._unfinished[task] = stranger
        task.add_done_callback(self._forget)

    def _drop_one(self) -> None:
        """Drop one handshake to make room for another."""
        having_tags = sum(each.has_tag for each in self._unfinished.values())
        of_those = 2 * having_tags > len(self._unfinished)
        among = {
            task: each.host for task, each in self._unfinished.items() if each.has_tag == of_those
        }
        host, _ = Counter(among.values()).most_common(1)[0]
        oldest = next(task for task, each in among.items() if each == host)
        self._unfinished.pop(oldest).connection.close()
        self._dropped.add(oldest)
        oldest.cancel()

    def _resume(self, bound: socket.socket) -> None:
        del self._retries[bound]
        self._loop.add_reader(bound, self._accept, bound)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        self._dropped.discard(task)
        # A task that is cancelled before its first step does not run its own clean-up.
        stranger = self._unfinished.pop(task, None)
        if stranger is not None:
            stranger.connection.close()

    async def _serve(self, stranger: "_Stranger") -> None:
        connection = stranger.connection
        address = connection.peer
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                greeted = await answer(
                    connection, self._hello, self._credentials, stranger.show_tag
                )
        except TimeoutError:
            self._refuse(connection, PeerLostError(address, "its handshake took too long"))
            return
        except TransportError as error:
            self._refuse(connection, error)
            return
        connection = greeted.connection
        connection.peer = display_name(greeted.hello, address)
        task = asyncio.current_task()
        assert task is not None
        del self._unfinished[task]
        member: Member | None = greeted.hello.get(MEMBER)
        whose = stranger.host if member is None else member.id
        of_one = sum(each == whose for each in self._serving.values())
        if len(self._serving) >= MAX_CONNECTIONS or of_one >= MAX_CONNECTIONS_OF_ONE:
            self._refuse(connection, RefusedError(f"{connection.peer} has too many connections"))
            return
        self._serving[task] = whose
        if greeted.role is Role.CHANNEL:
            moved = after_handshake(connection, greeted.secrets)
            handler = self._on_channel(TcpChannel(moved, greeted.hello, stranger.host))
            close = moved.close
        else:
            records = records_of(greeted.secrets)
            link = TcpLink(connection.detach(), connection.peer, self._link_timeout_s, records)
            handler, close = self._on_link(link, greeted.hello), link.close
        del greeted  # its secrets decrypt the whole connection, even after the keys are gone
        await self._hand_over(handler, connection.peer, close)

    def _refuse(self, connection: AsyncSocket, error: TransportError) -> None:
        connection.close()
        _log.debug("refused a connection: %s", error)
        if self._on_refused is not None:
            self._on_refused(connection.peer, error)

    async def _hand_over(
        self, handler: Awaitable[None], peer: str, close: Callable[[], None]
    ) -> None:
        try:
            await handler
        except BaseException as error:
            close()
            if not isinstance(error, Exception):
                raise
            _log.exception("serving %s failed", peer)


async def listen(
    address: str,
    *,
    hello: Mapping[str, Any],
    credentials: Credentials | None,
    on_channel: OnChannel,
    on_link: OnLink,
    on_refused: OnRefused | None = None,
    link_timeout_s: float = 30.0,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    max_unfinished_handshakes: int = MAX_UNFINISHED_HANDSHAKES,
) -> Listener:
    """Listen on ``address``: ``host:port``, ``[IPv6]:port``, ``:port`` for all interfaces.

    Port 0 takes a free port, the same for every address of a name. Each channel and link goes to
    its handler in a task of the listener. The handler owns it and may keep it after it returns; if
    the handler raises or is cancelled, the listener closes it. ``credentials``: shown to and
    required of every connection; None accepts any device. ``on_refused``: gets the address and
    error of each connection whose handshake failed.

    Raises:
        AddressError: the address cannot be listened on.
        ProtocolError: the hello is not JSON or too large.
    """
    encode_hello(hello)
    places = await resolve(address, to_listen=True)
    try:
        sockets = _bind_all(places)
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {describe(error)}") from error
    try:
        return Listener(
            sockets,
            hello=hello,
            credentials=credentials,
            on_channel=on_channel,
            on_link=on_link,
            on_refused=on_refused,
            link_timeout_s=link_timeout_s,
            handshake_timeout_s=handshake_timeout_s,
            max_unfinished_handshakes=max_unfinished_handshakes,
        )
    except BaseException:
        for bound in sockets:
            bound.close()
        raise


def _bind_all(places: Sequence[SocketAddress]) -> list[socket.socket]:
    """Sockets on one port of all these addresses that this device has, at least one."""
    for tries_left in reversed(range(_MOST_PORTS)):
        sockets: list[socket.socket] = []
        try:
            for family, place in places:
                port = sockets[0].getsockname()[1] if sockets else place[1]
                try:
                    sockets.append(_bind(family, (place[0], port, *place[2:])))
                except OSError as error:
                    # "localhost" also means ::1, which a device without IPv6 cannot bind.
                    is_last_hope = place is places[-1][1] and not sockets
                    if error.errno not in _NOT_HERE or is_last_hope:
                        raise
            break
        except OSError as error:
            is_chosen = places[0][1][1] == 0 and bool(sockets)
            for bound in sockets:
                bound.close()
            if not (error.errno == errno.EADDRINUSE and is_chosen and tries_left):
                raise
    return sockets


def _bind(family: int, place: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        # A restarted daemon must not wait for its old connections to time out.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(place)
        bound.listen(128)
    except BaseException:
        bound.close()
        raise
    return bound
