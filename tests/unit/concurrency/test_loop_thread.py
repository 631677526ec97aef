"""A loop in a thread: results, errors, Ctrl-C, and every order of closing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from edge.concurrency.loop_thread import LoopThread
from edge.errors import RequestError
from tests.support.processes import ctrl_c_once_asleep


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.close()


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


async def wait_for_ever(started: threading.Event, ended: list[str]) -> None:
    """Takes a moment to end when it is cancelled."""
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        await double(1)
        ended.append("cleaned up")


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    async def fail() -> None:
        raise LookupError("as it was")

    assert loop.run(double(21)) == 42
    with pytest.raises(LookupError, match="as it was"):
        loop.run(fail())
    assert loop.run(double(1)) == 2


def test_several_threads_at_once(loop: LoopThread) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=number: results.append(loop.run(double(n))))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [2 * number for number in range(8)]


def test_ctrl_c_cancels_and_waits_for_the_clean_up(loop: LoopThread) -> None:
    started, ended = threading.Event(), list[str]()

    def press() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait_for_ever(started, ended))
    assert ended == ["cleaned up"]
    thread.join()
    assert loop.run(double(2)) == 4


def test_ctrl_c_that_does_not_wake_who_waits(loop: LoopThread) -> None:
    ended = list[str]()
    with ctrl_c_once_asleep("wait"), pytest.raises(KeyboardInterrupt):
        loop.run(wait_for_ever(threading.Event(), ended))
    assert ended == ["cleaned up"]


def test_close_ends_what_other_threads_wait_for() -> None:
    loop = LoopThread("test-loop")
    started, ended = threading.Event(), list[str]()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            loop.run(wait_for_ever(started, ended))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    loop.close()
    thread.join()
    assert ended == ["cleaned up"]
    assert isinstance(raised[0], RequestError)
    assert "closed while this was under way" in str(raised[0])


def test_after_close_nothing_is_started() -> None:
    loop = LoopThread("test-loop")
    loop.close()
    loop.close()
    with pytest.raises(RequestError, match="the cluster is closed"):
        loop.run(double(1))
    loop.post(double(1))


def test_two_threads_close_at_once() -> None:
    for _ in range(20):
        loop = LoopThread("test-loop")
        together = threading.Barrier(2)

        def close(loop: LoopThread = loop, together: threading.Barrier = together) -> None:
            together.wait()
            loop.close()

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_work_that_races_with_close_either_runs_or_is_refused() -> None:
    for _ in range(50):
        loop = LoopThread("test-loop")
        outcomes: list[object] = []

        def work(loop: LoopThread = loop, outcomes: list[object] = outcomes) -> None:
            try:
                while True:
                    assert loop.run(double(4)) == 8
            except RequestError as error:
                outcomes.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        loop.run(double(1))
        loop.close()
        thread.join()
        assert len(outcomes) == 1


def test_posted_work_runs_and_its_failure_is_nobodys(loop: LoopThread) -> None:
    done = threading.Event()

    async def fail() -> None:
        done.set()
        raise LookupError("nobody asks")

    loop.post(fail())
    assert done.wait(60)
    assert loop.run(double(1)) == 2


def test_the_loops_own_thread_cannot_wait_for_itself(loop: LoopThread) -> None:
    async def call_back() -> None:
        with pytest.raises(RequestError, match="progress function"):
            loop.run(double(1))

    loop.run(call_back())


def test_ctrl_c_before_the_loop_heard_of_the_work(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started, nothing waits for it, and the loop goes on."""
    started = threading.Event()
    submit = loop.submit

    def pressed(callback: Callable[[], object]) -> bool:
        monkeypatch.setattr(loop, "submit", submit)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "submit", pressed)
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait_for_ever(started, []))
    assert not started.is_set()
    assert loop.run(double(2)) == 4


def test_ctrl_c_while_the_thread_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LoopThread("interrupted")
