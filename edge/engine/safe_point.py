"""Work for a thread that need not wait for the end of what the thread is busy with."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class Asides:
    """Put in by any thread, done by the one that calls `do` between two pieces of its own work."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, function: Callable[[], Result]) -> Future[Result]:
        """What becomes of it; whoever calls this sees to it that `do` is called.

        It is not done once the future is cancelled.
        """
        done: Future[Result] = Future()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._queue.put(work)
        return done

    def do(self) -> None:
        """All that is there now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()()
