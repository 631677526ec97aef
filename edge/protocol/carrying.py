"""Members that still have a key of before are taken along: looked for, and told of the new one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from edge import transport
from edge.transport import Credentials, Past, PeerFound, PeerRecord

_TELL_WITHIN_S = 3.0


async def carry_along(
    credentials: Credentials,
    cluster: str,
    interfaces: Sequence[str] | None,
    *,
    announced: PeerRecord | None = None,
    on_carried: Callable[[], None] = lambda: None,
) -> None:
    """Tell each peer that is announced under a key that the cluster had before, until cancelled.

    `announced` is shown under those keys, too, so that whoever looks for peers by one of them comes
    here and is told. `on_carried` is called for each that has followed.
    """
    await asyncio.gather(
        *(
            _of_key(past, credentials, cluster, interfaces, announced, on_carried)
            for past in credentials.past()
        )
    )


async def _of_key(
    past: Past,
    credentials: Credentials,
    cluster: str,
    interfaces: Sequence[str] | None,
    announced: PeerRecord | None,
    on_carried: Callable[[], None],
) -> None:
    discovery = transport.ZeroconfDiscovery(
        cluster=cluster, key=past.tag_key, interfaces=interfaces
    )
    try:
        # Whoever cannot be told today is told another day.
        with contextlib.suppress(transport.TransportError, OSError, ValueError):
            if announced is not None:
                await discovery.announce(announced)
            async for event in discovery.watch():
                if not isinstance(event, PeerFound):
                    continue
                for address in event.record.addresses:
                    if await transport.bring_rotation(
                        address, credentials, timeout_s=_TELL_WITHIN_S
                    ):
                        on_carried()
                        break
    finally:
        await discovery.aclose()
