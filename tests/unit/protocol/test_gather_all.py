"""Calls to several peers at once, of which one fails: what its caller still has of its time."""

from __future__ import annotations

import asyncio

import pytest

from edge.protocol.peer_info import gather_all
from tests.support.passing_time import let_pass


async def fails() -> None:
    raise ValueError("first")


def test_results_are_in_order_and_none_of_nothing() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def at_once(value: int) -> int:
        return value

    async def scenario() -> None:
        assert await gather_all([later(1), at_once(2)]) == [1, 2]
        assert await gather_all([]) == []

    asyncio.run(scenario())


def test_the_first_error_is_raised_once_the_others_have_ended() -> None:
    ended = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)
            raise KeyError("second")

    async def scenario() -> None:
        with pytest.raises(ValueError, match="first"):
            await gather_all([hangs(), fails(), hangs()])
        assert ended == [True, True]

    asyncio.run(scenario())


def test_a_timeout_around_a_failure_still_is_one() -> None:
    async def hangs_after_a_failure() -> None:
        async with asyncio.timeout(1e6):
            with pytest.raises(ValueError, match="first"):
                await gather_all([fails(), asyncio.sleep(1e9)])
            let_pass(1e6)
            await asyncio.Event().wait()

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await hangs_after_a_failure()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(scenario())


def test_a_cancelled_caller_waits_for_the_end_of_all() -> None:
    ended = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scenario() -> None:
        caller = asyncio.create_task(gather_all([hangs(), hangs()]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert ended == [True, True]

    asyncio.run(scenario())
