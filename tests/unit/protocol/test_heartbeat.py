"""When silence counts, and whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edge.protocol.heartbeat import ALIVE, Hearing, UsualGaps
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
    *,
    at_most_s: float | None = None,
) -> None:
    async def main() -> None:
        ours, theirs = MemoryChannel.pair()
        hearing = Hearing(ours, silent_after_s=SILENT_AFTER_S, at_most_s=at_most_s)
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


def noted(*gaps_s: float) -> float:
    gaps = UsualGaps()
    for gap_s in gaps_s:
        gaps.note(gap_s)
    return gaps.longest_s()


@pytest.mark.parametrize(
    ("gaps_s", "low_s", "high_s"),
    [
        ([], 0, 0),
        ([0.4] * 50, 0.4, 1.0),  # a steady device
        ([0.2, 0.6] * 50, 0.8, 2.0),  # as looks at a steady device find it
        ([3.0], 6.0, 9.0),  # slow from the beginning
        ([*[0.4] * 50, 2.0], 5.0, 9.0),  # the first pause
        ([*[0.4] * 50, 2.0, *[0.4] * 22], 2.5, 4.5),  # some nine seconds after it
        ([*[0.4] * 50, 2.0, *[0.4] * 150], 0.4, 1.0),  # a minute after it
        ([0.5, 1.5] * 20, 2.5, 4.0),  # a device at full load
    ],
)
def test_the_longest_gap_to_be_expected_follows_from_those_before(
    gaps_s: list[float], low_s: float, high_s: float
) -> None:
    assert low_s <= noted(*gaps_s) <= high_s


AT_MOST_S = 20.0
LATE_S = SILENT_AFTER_S - 2
"""The gaps of a side at full load, so that it may be silent for longer than `AT_MOST_S`."""


async def speak_late(theirs: Channel, *, every_s: float) -> None:
    for _ in range(3):
        await pass_slowly(every_s)
        await theirs.send(ALIVE)
        await pass_slowly(0.6)


def test_a_side_that_was_late_before_has_longer_up_to_a_limit() -> None:
    async def story(hearing: Hearing, theirs: Channel, waiting: asyncio.Task[float]) -> None:
        await speak_late(theirs, every_s=LATE_S)
        assert hearing.limit_s == AT_MOST_S
        await pass_slowly(AT_MOST_S - 2)
        assert not waiting.done()
        await pass_slowly(3)
        assert await waiting == pytest.approx(AT_MOST_S, abs=0.7)

    listening(story, at_most_s=AT_MOST_S)


def test_a_punctual_side_has_no_longer_than_the_least() -> None:
    async def story(hearing: Hearing, theirs: Channel, waiting: asyncio.Task[float]) -> None:
        for _ in range(5):
            await speak_late(theirs, every_s=SHORT_S)
        assert hearing.limit_s == SILENT_AFTER_S
        await pass_slowly(SILENT_AFTER_S + 1)
        assert await waiting == pytest.approx(SILENT_AFTER_S, abs=0.5)

    listening(story, at_most_s=AT_MOST_S)


def test_time_in_which_we_do_not_read_is_no_gap_of_theirs() -> None:
    async def story(hearing: Hearing, theirs: Channel, _: asyncio.Task[float]) -> None:
        for _turn in range(3):
            hearing.not_listening()
            await pass_slowly(LATE_S)
            hearing.listening()
            await theirs.send(ALIVE)
            await pass_slowly(0.6)
        assert hearing.limit_s == SILENT_AFTER_S

    listening(story, at_most_s=AT_MOST_S)


def test_without_a_limit_to_grow_to_lateness_changes_nothing() -> None:
    async def story(hearing: Hearing, theirs: Channel, _: asyncio.Task[float]) -> None:
        await speak_late(theirs, every_s=LATE_S)
        assert hearing.limit_s == SILENT_AFTER_S

    listening(story)
