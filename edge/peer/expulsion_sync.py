"""Synchronises expulsions with other members (gossip): asks before serving, tells what is new.

A member that was off has missed expulsions, and an expelled device does not report its own. So a
daemon asks the announced members after its start and after each suspension, before it serves a
device that may have been expelled. If no other member is there, it serves after the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge import transport
from edge.errors import RequestError
from edge.protocol.announced_peers import ASKED_WITHIN_S, MOST_AT_ONCE, is_announced_as, is_any
from edge.protocol.expulsion import LOOK_EVERY_S
from edge.system.since_boot import since_boot_s
from edge.transport import Credentials, Discovery, Member, PeerFound, PeerGone, PeerRecord

FIRST_LOOK_S = 2.0
"""Seconds of asking after the start or a suspension. Zeroconf asks at once and after a second, and
answers come within 0.2 s. A coordinator waits longer for its first answer."""

AGAIN_AFTER_S = 60.0
"""Seconds until a peer that could not be reached is tried again."""

AGAIN_AT_FIRST_S = 5.0
"""The same in the first minutes: a network that wakes with its host takes a few seconds."""

SUSPENDED_S = 2.0
"""A tick that comes this late means a suspension, in which news may have been missed. With the time
between two ticks it is no longer than a sender waits for an answer."""

_AT_FIRST_S = 120.0


@dataclass(slots=True)
class _Other:
    """An announced peer."""

    record: PeerRecord
    found_s: float
    told: bytes | None = None
    """The news that it has received. None: none yet."""
    due_s: float = 0.0
    """When to try it next, if it lacks news."""
    telling: asyncio.Task[None] | None = None


class ExpulsionSync:
    """One daemon's exchange. `run` it once, from the start."""

    def __init__(
        self,
        credentials: Credentials,
        discovery: Discovery,
        hello: Mapping[str, Any],
        *,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        """clock: seconds, including time in suspension."""
        self._credentials = credentials
        self._discovery = discovery
        self._hello = hello
        self._others: dict[str, _Other] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_due = asyncio.Event()
        self._has_looked = asyncio.Event()
        self._looking: asyncio.TimerHandle | None = None
        self._clock = clock
        self._awake_s: float | None = None
        """Time of the last tick. None: not running."""

    async def lets_in(self, member: Member) -> bool:
        """Whether `member` still is one, once the announced members have been asked.

        Answers at once for this device and for the cluster's founder, which cannot be expelled.
        """
        if not self._credentials.is_spared(member.id):
            self._notice_suspension()  # the call may come before the tick that is due
            while not self._has_looked.is_set():
                await self._has_looked.wait()
                self._notice_suspension()
        return self._credentials.is_admitted(member.id, member.edition)

    async def run(self) -> None:
        """Run until cancelled, or until discovery is impossible."""
        loop = asyncio.get_running_loop()
        self._awake_s = self._clock()
        self._looking = loop.call_later(FIRST_LOOK_S, self._has_looked.set)
        telling = asyncio.create_task(self._tell())
        try:
            # Announcing fails in the same way, and reports it.
            with contextlib.suppress(transport.TransportError):
                async for event in self._discovery.watch():
                    if isinstance(event, PeerFound):
                        self._meet(event.record)
                    elif isinstance(event, PeerGone):
                        self._forget(event.id)
        finally:
            self._awake_s = None
            self._looking.cancel()
            self._has_looked.set()
            tasks = [telling, *self._under_way]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _notice_suspension(self) -> None:
        """After a suspension, begin as at the start: ask all members again."""
        if self._awake_s is None:
            return
        slept_s = self._clock() - self._awake_s
        self._awake_s += slept_s
        if slept_s <= LOOK_EVERY_S + SUSPENDED_S:
            return
        self._has_looked.clear()
        if self._looking is not None:
            self._looking.cancel()
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(FIRST_LOOK_S, self._has_looked.set)
        for other in list(self._others.values()):
            self._meet(other.record)

    def _meet(self, record: PeerRecord) -> None:
        self._forget(record.id)
        self._others[record.id] = _Other(record, asyncio.get_running_loop().time())
        self._is_due.set()

    def _forget(self, id: str) -> None:
        other = self._others.pop(id, None)
        if other is not None and other.telling is not None:
            other.telling.cancel()

    async def _tell(self) -> None:
        """Send news to every peer that lacks it. Another process of this device may have added
        some."""
        while True:
            self._notice_suspension()
            with contextlib.suppress(RequestError):  # the key files are being repaired
                self._begin_with(self._credentials.news())
            self._is_due.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._is_due.wait()

    def _begin_with(self, news: bytes) -> None:
        loop = asyncio.get_running_loop()
        for other in sorted(self._others.values(), key=lambda other: other.due_s):
            if len(self._under_way) >= MOST_AT_ONCE:
                break
            if other.telling is None and other.told != news and other.due_s <= loop.time():
                other.telling = loop.create_task(self._exchange(other, news))
                self._under_way.add(other.telling)
                other.telling.add_done_callback(self._under_way.discard)

    async def _exchange(self, other: _Other, news: bytes) -> None:
        """A handshake exchanges news in both directions; what it brings is sent on at the next
        tick."""
        begun_s = asyncio.get_running_loop().time()
        try:
            if await is_any(other.record, partial(self._answers, other.record.id)):
                other.told = news
            else:
                at_first = begun_s - other.found_s < _AT_FIRST_S
                other.due_s = begun_s + (AGAIN_AT_FIRST_S if at_first else AGAIN_AFTER_S)
        finally:
            other.telling = None
            self._is_due.set()

    async def _answers(self, id: str, address: str) -> bool:
        with contextlib.suppress(TimeoutError, transport.TransportError):
            async with asyncio.timeout(ASKED_WITHIN_S):
                channel = await transport.connect(
                    address, hello=self._hello, credentials=self._credentials
                )
                await channel.aclose()
                return is_announced_as(channel.remote_hello, id)
        return False
