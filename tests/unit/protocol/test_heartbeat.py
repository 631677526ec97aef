"""When silence counts, and whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edge.protocol.heartbeat import ALIVE, Hearing
from edge.transport import Channel
from edge.transport.channel import MemoryChannel
from tests.support.passing_time import let_pass

SILENT_AFTER_S = 10.0
SHORT_S = 0.3
"""Shorter than what tells a stopped process from one that merely looks."""


async def pass_slowly(seconds: float) -> None:
    """As it does for a loop that runs: whoever waits looks again and again."""
    for _ in range(round(seconds / SHORT_S)):
        let_pass(SHORT_S)
        for _ in range(5):
            await asyncio.sleep(0)


def listening(
    story: Callable[[Hearing, Channel, asyncio.Task[float]], Awaitable[None]],
) -> None:
    async def main() -> None:
        ours, theirs = MemoryChannel.pair()
        hearing = Hearing(ours, silent_after_s=SILENT_AFTER_S)
        waiting = asyncio.create_task(hearing.until_silent())
        receiving = asyncio.create_task(receive_all(ours))
        await asyncio.sleep(0)
        await story(hearing, theirs, waiting)
        for task in (waiting, receiving):
            task.cancel()
        await asyncio.gather(waiting, receiving, return_exceptions=True)

    asyncio.run(main())


async def receive_all(channel: Channel) -> None:
    while True:
        await channel.receive()


def test_who_says_nothing_is_silent_for_that_long() -> None:
    async def story(_: Hearing, __: Channel, waiting: asyncio.Task[float]) -> None:
        await pass_slowly(SILENT_AFTER_S - 1)
        assert not waiting.done()
        await pass_slowly(2)
        assert await waiting == pytest.approx(SILENT_AFTER_S, abs=0.5)

    listening(story)


def test_who_speaks_in_time_begins_anew() -> None:
    async def story(hearing: Hearing, theirs: Channel, waiting: asyncio.Task[float]) -> None:
        for _ in range(3):
            await pass_slowly(SILENT_AFTER_S - 1)
            await theirs.send(ALIVE)
            await pass_slowly(0.6)
        assert not waiting.done()

    listening(story)


def test_time_in_which_we_were_stopped_is_not_theirs() -> None:
    """An hour with the lid down, then they have as long as ever."""

    async def story(_: Hearing, __: Channel, waiting: asyncio.Task[float]) -> None:
        let_pass(3600)
        await pass_slowly(SILENT_AFTER_S - 1)
        assert not waiting.done()

    listening(story)


def test_time_in_which_we_do_not_read_is_not_theirs() -> None:
    async def story(hearing: Hearing, __: Channel, waiting: asyncio.Task[float]) -> None:
        hearing.not_listening()
        await pass_slowly(3 * SILENT_AFTER_S)
        hearing.listening()
        await pass_slowly(SILENT_AFTER_S - 1)
        assert not waiting.done()
        await pass_slowly(2)
        assert waiting.done()

    listening(story)
