"""A thread does its work in order, and what waits for a safe point in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from edge.engine.compute_thread import ComputeThread, ThreadEndedError

WITHIN_S = 60.0


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def thread(log: list[str]) -> Iterator[ComputeThread]:
    made = ComputeThread("compute", at_end=lambda: log.append("end"))
    yield made
    made.close()


def test_work_is_done_in_order_and_the_end_comes_last(
    thread: ComputeThread, log: list[str]
) -> None:
    thread.post(lambda: log.append("first"))
    assert thread.call(lambda: len(log)).result(WITHIN_S) == 1
    thread.post(lambda: log.append("second"))
    thread.close()
    assert log == ["first", "second", "end"]


def test_what_goes_wrong_is_told_to_who_waits(thread: ComputeThread) -> None:
    def fail() -> None:
        raise OSError("no disk")

    for ask in (thread.call, thread.at_safe_point):
        broken, whole = ask(fail), ask(lambda: None)
        assert isinstance(broken.exception(WITHIN_S), OSError)
        whole.result(WITHIN_S)


def test_a_safe_point_is_not_the_end_of_the_work(thread: ComputeThread, log: list[str]) -> None:
    """What was asked for meanwhile is done there; before what was queued, and each once."""
    is_busy, may_go_on = threading.Event(), threading.Event()

    def work() -> None:
        is_busy.set()
        may_go_on.wait(WITHIN_S)
        log.append("half")
        thread.safe_point()
        log.append("whole")

    thread.post(work)
    assert is_busy.wait(WITHIN_S)
    thread.post(lambda: log.append("next"))
    asked = thread.at_safe_point(lambda: log.append("in between"))
    may_go_on.set()
    asked.result(WITHIN_S)
    thread.close()
    assert log == ["half", "in between", "whole", "next", "end"]


def test_what_nobody_waits_for_any_more_is_not_done(thread: ComputeThread, log: list[str]) -> None:
    """And what comes after it is."""
    may_go_on = threading.Event()
    thread.post(lambda: (may_go_on.wait(WITHIN_S), None)[1])
    for ask in (thread.call, thread.at_safe_point):
        first, second = ask(lambda: log.append("first")), ask(lambda: log.append("second"))
        assert first.cancel()
        may_go_on.set()
        second.result(WITHIN_S)
        with pytest.raises(CancelledError):
            first.result()
        may_go_on.clear()
        thread.post(lambda: (may_go_on.wait(WITHIN_S), None)[1])
    may_go_on.set()
    thread.close()
    assert log == ["second", "second", "end"]


def test_a_thread_that_has_ended_lets_nobody_wait_for_a_safe_point(
    thread: ComputeThread, log: list[str]
) -> None:
    thread.close()
    thread.at_safe_point(lambda: log.append("after")).result(WITHIN_S)
    assert log == ["end", "after"]


def test_a_thread_that_has_ended_says_so_to_who_would_wait(
    thread: ComputeThread, log: list[str]
) -> None:
    thread.close()
    with pytest.raises(ThreadEndedError):
        thread.call(lambda: log.append("after")).result(WITHIN_S)
    assert log == ["end"]
