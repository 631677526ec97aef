"""Tokens that come fast are told together; nothing that anybody waits for is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from edge.engine import report_batching
from edge.engine.report_batching import ReportBatcher
from edge.protocol.frame_codec import Event
from edge.protocol.kv_frames import Reserved
from edge.protocol.step_frames import Tokens


def token(number: int, *, last: bool = False, count: int = 1) -> Tokens:
    return Tokens(tokens=(number,) * count, ends=(None,) * count, last=last, chosen_s=0.0)


def reserved() -> Reserved:
    return Reserved(request="r", why_not="")


class Told:
    """What was told, in order; and when the loop is asked to, it turns."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reports = ReportBatcher(self._tell)

    def _tell(self, event: Event, sent: Callable[[], None]) -> None:
        self.events.append(event)
        sent()

    async def after(self, *events: Event) -> list[Event]:
        """All that was told once the loop has nothing to do but to wait for a time."""
        for event in events:
            self.reports.report(event)
        for _ in range(5):
            await asyncio.sleep(0)
        return list(self.events)


def run(check: Callable[[Told], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(Told())

    asyncio.run(main())


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_batching, "TOGETHER_S", 1e6)


def test_the_first_token_is_told_at_once_and_those_behind_it_wait() -> None:
    first, *others = map(token, range(4))

    async def check(told: Told) -> None:
        assert await told.after(first) == [first]
        assert await told.after(*others) == [first]
        told.reports._time_is_over()
        assert told.events == [first, *others]
        assert await told.after(token(5)) == [first, *others], "these were told at its time"
        told.reports._time_is_over()
        told.reports._time_is_over()
        assert await told.after(token(6)) == [first, *others, token(5), token(6)]

    run(check)


@pytest.mark.parametrize(
    "before", [reserved(), token(0, last=True), Tokens(tokens=(), ends=(), last=True, chosen_s=0.0)]
)
def test_the_first_token_of_the_next_run_is_told_at_once(before: Event) -> None:
    """Whatever was told shortly before it: what a prompt needs, or the end of another run."""
    first, second = token(1), token(2)

    async def check(told: Told) -> None:
        assert await told.after(before) == [before]
        assert await told.after(first) == [before, first]
        assert await told.after(second) == [before, first]
        assert await told.after(token(3, last=True)) == [before, first, second, token(3, last=True)]
        told.events.clear()
        assert await told.after(first) == [first]
        assert await told.after(second) == [first]

    run(check)


@pytest.mark.parametrize("event", [token(9, last=True), reserved(), token(9, count=100)])
def test_what_is_waited_for_takes_along_what_waits(event: Event) -> None:
    """The last token of a run, anything else, and what would take the room of others."""
    first, second = token(1), token(2)

    async def check(told: Told) -> None:
        assert await told.after(first) == [first]
        assert await told.after(second) == [first]
        assert await told.after(event) == [first, second, event]

    run(check)


def test_what_waits_is_told_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_batching, "TOGETHER_S", 0.001)

    async def check(told: Told) -> None:
        await told.after(token(1))
        told.reports.report(token(2))
        while len(told.events) < 2:  # noqa: ASYNC110 - a timer of the loop tells it
            await asyncio.sleep(0)
        assert told.events == [token(1), token(2)]

    run(check)


def test_another_thread_reports_in_order() -> None:
    events: list[Event] = [token(number, last=number % 7 == 0) for number in range(200)]

    async def check(told: Told) -> None:
        def report_all() -> None:
            for each in events:
                told.reports.report(each)

        thread = threading.Thread(target=report_all)
        thread.start()
        await asyncio.to_thread(thread.join)
        await told.after(token(200, last=True))
        assert told.events[:200] == events

    run(check)


def test_whoever_reports_after_the_loop_has_ended_is_not_hurt() -> None:
    async def main() -> Told:
        return Told()

    told = asyncio.run(main())
    told.reports.report(token(1))
    assert not told.events
