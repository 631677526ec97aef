"""Key rotation: members that still have an earlier key of the cluster are found and told the new
one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from edge import transport
from edge.protocol.announced_peers import ASKED_WITHIN_S, MOST_AT_ONCE, is_any
from edge.transport import Credentials, Discovery, PeerFound, PeerGone, PeerRecord


async def push_key_rotation(
    credentials: Credentials,
    cluster: str,
    interfaces: Sequence[str] | None,
    *,
    announced: PeerRecord | None = None,
    on_carried: Callable[[], None] = lambda: None,
) -> None:
    """Tell every peer that is announced under an earlier key of the cluster, until cancelled.

    announced: this device's record, also announced under those keys, so that devices with an
    earlier key find this one and are told. on_carried: called for each peer that took the new key.
    """
    carrying = KeyRotationPush(credentials, on_carried)
    await asyncio.gather(
        *(
            carrying.run(
                transport.ZeroconfDiscovery(
                    cluster=cluster, key=past.tag_key, interfaces=interfaces
                ),
                announced,
            )
            for past in credentials.past()
        )
    )


class KeyRotationPush:
    """Tells peers the new key, at most `MOST_AT_ONCE` at the same time, in the order in which they
    were found."""

    def __init__(self, credentials: Credentials, on_carried: Callable[[], None]) -> None:
        self._credentials = credentials
        self._on_carried = on_carried
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self, discovery: Discovery, announced: PeerRecord | None = None) -> None:
        """Tell the peers that `discovery` finds, until cancelled. Closes `discovery`."""
        try:
            async with asyncio.TaskGroup() as group:
                # Peers that cannot be told now are told at the next attempt.
                with contextlib.suppress(transport.TransportError, OSError, ValueError):
                    if announced is not None:
                        await discovery.announce(announced)
                    await self._watch(discovery, group)
        finally:
            await discovery.aclose()

    async def _watch(self, discovery: Discovery, group: asyncio.TaskGroup) -> None:
        due: dict[str, PeerRecord] = {}
        telling: set[str] = set()

        async def tell(id: str) -> None:
            while id in due:
                async with self._turns:
                    record = due.pop(id, None)
                    if record is not None and await is_any(record, self._follows):
                        self._on_carried()
            telling.discard(id)

        async for event in discovery.watch():
            if isinstance(event, PeerGone):
                due.pop(event.id, None)
            elif isinstance(event, PeerFound):
                due[event.record.id] = event.record
                if event.record.id not in telling:
                    telling.add(event.record.id)
                    group.create_task(tell(event.record.id))

    async def _follows(self, address: str) -> bool:
        with contextlib.suppress(OSError):  # this device may have no socket left
            return await transport.bring_rotation(
                address, self._credentials, timeout_s=ASKED_WITHIN_S
            )
        return False
