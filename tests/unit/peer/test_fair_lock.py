"""Owners take turns, however often each asks."""

from __future__ import annotations

import asyncio

import pytest

from edge.peer.fair_lock import FairLock


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    """What of it is under way, and in which order it began."""

    def __init__(self, turns: FairLock) -> None:
        self._turns = turns
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def asks(self, *names: str) -> None:
        """The first letter is whose it is."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._do(name))
        await settled()

    async def _do(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.began.append(name)
            await self.ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await settled()


def test_who_asks_often_keeps_others_waiting_for_one_turn() -> None:
    async def main() -> None:
        turns = FairLock()
        work = Work(turns)
        await work.asks("a1", "a2", "a3", "a4", "b1", "c1")
        assert work.began == ["a1"]
        await work.end("a1", "b1", "c1", "a2")
        assert work.began == ["a1", "b1", "c1", "a2", "a3"]
        await work.asks("b2")
        await work.end("a3", "b2")
        assert work.began[5:] == ["b2", "a4"]
        assert turns.locked()
        await work.end("a4")
        assert not turns.locked()
        assert not turns._waiting

    asyncio.run(main())


def test_of_those_that_work_at_once_no_two_are_of_one_owner() -> None:
    async def main() -> None:
        work = Work(FairLock(at_once=2))
        await work.asks("a1", "a2", "a3", "b1", "c1")
        assert work.began == ["a1", "b1"]
        await work.end("a1")
        assert work.began == ["a1", "b1", "c1"]
        await work.end("b1")
        assert work.began == ["a1", "b1", "c1", "a2"]
        await work.end("c1", "a2", "a3")
        assert work.began[-1] == "a3"

    asyncio.run(main())


@pytest.mark.parametrize("gone", ["a1", "a2", "b1"])
def test_who_gives_up_keeps_nobody(gone: str) -> None:
    async def main() -> None:
        turns = FairLock()
        work = Work(turns)
        await work.asks("a1", "a2", "b1", "b2")
        work.tasks[gone].cancel()
        await settled()
        for name in ("a1", "b1", "a2", "b2"):
            await work.end(name)
        assert sorted(work.began) == sorted({"a1", "a2", "b1", "b2"} - {gone} | {"a1"})
        assert not turns.locked()
        assert not turns._waiting

    asyncio.run(main())


def test_a_turn_that_comes_as_its_owner_gives_up_is_passed_on() -> None:
    async def main() -> None:
        turns = FairLock()
        work = Work(turns)
        await work.asks("a1", "b1", "c1")
        work.ends["a1"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        work.tasks["b1"].cancel()
        await settled()
        await work.end("b1", "c1")
        assert work.began[-1] == "c1"
        assert not turns.locked()

    asyncio.run(main())
