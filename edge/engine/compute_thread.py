"""One thread that does its work in order, and other work at safe points in between.

Knows nothing of shards. A safe point is where the thread may do what need not wait for the end of
what it is busy with.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

_Work = Callable[[], None]


class ThreadEndedError(Exception):
    """Work came when nobody does it any more."""


class ComputeThread:
    """All but `safe_point` is for other threads, which is for its own."""

    def __init__(self, name: str, *, at_end: Callable[[], None]) -> None:
        """at_end: the last thing that it does."""
        self._at_end = at_end
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._in_between: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        """Nothing that is awaited is behind the end in the queue."""
        self._is_closed = False
        self.is_working = False
        """It does what was asked at this moment."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Do it after all that was posted before. It raises nothing."""
        self._queue.put(work)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Likewise, for who waits for the result; not done once the future is cancelled.

        Its result is ThreadEndedError once the thread is closed.
        """
        done, work = _awaited(function)
        with self._mutex:
            if self._is_closed:
                done.set_exception(ThreadEndedError())
            else:
                self._queue.put(work)
        return done

    def at_safe_point(self, function: Callable[[], Result]) -> Future[Result]:
        """Call it at the next safe point: now, if the thread has no work or has ended."""
        done, work = _awaited(function)
        self._in_between.put(work)
        self._queue.put(self.safe_point)
        if self._is_closed:  # perhaps there is no thread any more
            self.safe_point()
        return done

    def safe_point(self) -> None:
        """Do all that waits for a safe point."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._in_between.get_nowait()()

    def close(self) -> None:
        """End the thread, once it has done what was asked before, and wait for it."""
        with self._mutex:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self.is_working = True
            work()
            self.is_working = False
        self._at_end()
        self.safe_point()


def _awaited(function: Callable[[], Result]) -> tuple[Future[Result], _Work]:
    done: Future[Result] = Future()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    return done, work
