"""Threads beside a loop: never left behind, whatever is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edge.concurrency.blocking import StopFlag, Stopped, run_blocking, uninterrupted


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        assert await run_blocking(lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            await run_blocking(lambda: 1 // 0)

    asyncio.run(main())


def test_a_cancelled_wait_lasts_until_the_thread_has_ended() -> None:
    events: list[str] = []

    async def main() -> None:
        started, may_end = threading.Event(), threading.Event()

        def work() -> str:
            started.set()
            may_end.wait()
            events.append("worked")
            return "result"

        task = asyncio.create_task(run_blocking(work, discard=events.append))
        await asyncio.to_thread(started.wait)
        for _ in range(3):  # impatience changes nothing
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert events == ["worked", "result"]


def test_the_flag_ends_long_work_early() -> None:
    stopped = threading.Event()

    async def main() -> None:
        started, stop = threading.Event(), StopFlag()

        def work() -> None:
            try:
                while True:
                    started.set()
                    stop.check()
            except Stopped:
                stopped.set()
                raise

        task = asyncio.create_task(run_blocking(work, stop=stop.set))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert stopped.is_set()


def test_a_clean_up_is_not_interrupted() -> None:
    events: list[str] = []

    async def main() -> None:
        gate = asyncio.Event()

        async def clean_up() -> None:
            await gate.wait()
            events.append("cleaned")

        task = asyncio.create_task(uninterrupted(clean_up()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert events == ["cleaned"]


def test_an_uninterrupted_failure_is_seen() -> None:
    async def fail() -> None:
        raise LookupError("as it was")

    with pytest.raises(LookupError, match="as it was"):
        asyncio.run(uninterrupted(fail()))
