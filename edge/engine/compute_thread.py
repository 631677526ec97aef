"""A compute thread: runs a queue of work in order, and short work at safe points in between.

Knows nothing of shards. At a safe point the thread may run short work before its current work ends.
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
    """The compute thread was closed before it ran this work."""


class ComputeThread:
    """A compute thread. Only the thread itself calls `safe_point`; other threads call the rest."""

    def __init__(self, name: str, *, at_end: Callable[[], None]) -> None:
        """at_end: the last function that the thread runs."""
        self._at_end = at_end
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._in_between: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        """Keeps calls from entering the queue behind its end."""
        self._is_closed = False
        self.is_working = False
        """Whether the thread is running queued work."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Queue work that raises nothing."""
        self._queue.put(work)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Queue a function and return its future. It is skipped if the future is cancelled before.

        The future fails with ThreadEndedError once the thread is closed.
        """
        done, work = _awaited(function)
        with self._mutex:
            if self._is_closed:
                done.set_exception(ThreadEndedError())
            else:
                self._queue.put(work)
        return done

    def at_safe_point(self, function: Callable[[], Result]) -> Future[Result]:
        """Call it at the next safe point: at once if the thread has no work or has ended."""
        done, work = _awaited(function)
        self._in_between.put(work)
        self._queue.put(self.safe_point)
        if self._is_closed:  # the thread may have ended
            self.safe_point()
        return done

    def safe_point(self) -> None:
        """Run the work that waits for a safe point."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._in_between.get_nowait()()

    def close(self) -> None:
        """Run the queued work, then end the thread and wait for its end."""
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
            return  # cancelled before it began
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    return done, work
