"""Peers that are announced, asked without regard to each other: an expelled device, or whoever has
a token, can announce what does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from edge.errors import EdgeError, NetworkError
from edge.host.interfaces import dial_order
from edge.transport import PeerRecord

MOST_AT_ONCE = 64
"""More than a home has devices; each at a few addresses."""

ASKED_WITHIN_S = 3.0
"""For each address."""

NEXT_AFTER_S = 0.25
"""RFC 8305, section 5: what answers at all within a home does so in less."""

ANNOUNCED = "announced"
"""In the hello of a daemon: the ids of its announcements."""

Answer = TypeVar("Answer")


def is_announced_as(hello: Mapping[str, Any], id: str) -> bool:
    """Whether the daemon with this hello made the announcement with this id. An announced address
    may be another daemon's, too: many devices have a bridge with the same address."""
    told = hello.get(ANNOUNCED)
    return isinstance(told, list) and id in told


async def is_any(record: PeerRecord, asked: Callable[[str], Awaitable[bool]]) -> bool:
    """Whether it is so of any of the peer's addresses. All are asked at once, each for its full
    time: whoever announces its own among others is not to see by that when another one answered."""
    return any(await asyncio.gather(*map(asked, record.addresses)))


async def first_answer(
    record: PeerRecord, asked: Callable[[str], Coroutine[Any, Any, Answer]]
) -> Answer:
    """The answer by one of the peer's addresses: the first of `dial_order`, unless that fails or
    lets wait; each is asked a moment after the one before, which is still being asked at the same
    time.

    Raises the last error where none answers, or NetworkError where there is none.
    """
    failure: EdgeError = NetworkError(f"{record.name} announces no address")
    left = dial_order(record.addresses)
    asking: list[asyncio.Task[Answer]] = []
    try:
        while left or asking:
            if left:
                asking.append(asyncio.create_task(asked(left.pop(0))))
            done, _ = await asyncio.wait(
                asking,
                timeout=NEXT_AFTER_S if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in [each for each in asking if each in done]:
                asking.remove(task)
                try:
                    return task.result()
                except EdgeError as error:
                    failure = error
        raise failure
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
