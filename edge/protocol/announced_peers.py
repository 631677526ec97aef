"""Peers that are announced, asked without regard to each other: an expelled device, or whoever has
a token, can announce what does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from edge.transport import PeerRecord

MOST_AT_ONCE = 64
"""More than a home has devices; each at a few addresses."""

ASKED_WITHIN_S = 3.0
"""For each address."""


async def is_any(record: PeerRecord, asked: Callable[[str], Awaitable[bool]]) -> bool:
    """Whether it is so of any of the peer's addresses. All are asked at once, each for its full
    time: whoever announces its own among others is not to see by that when another one answered."""
    return any(await asyncio.gather(*map(asked, record.addresses)))
