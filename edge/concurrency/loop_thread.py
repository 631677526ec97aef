"""An event loop in a thread of its own, so that a blocking API can stand on asynchronous parts."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from edge.errors import RequestError

T = TypeVar("T")

SIGNALS_SEEN_WITHIN_S = 0.2
"""For how long a thread sleeps at once while it waits.

The handler of a signal runs between two instructions of the main thread. A signal that comes just
as that thread falls asleep, or to another thread, does not wake it: Ctrl-C would be seen at the end
of what it waits for.
"""

_CLOSED = "the cluster is closed; open it again"


class LoopThread:
    """Runs coroutines for callers of other threads until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._process = os.getpid()
        # Re-entrant: a finaliser may `post` in the middle of another call of the same thread.
        self._mutex = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C while it starts: it ends by itself
            with self._mutex:
                self.submit(self._loop.stop)
                self._is_closed = True
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Interrupted by Ctrl-C it is cancelled and awaited first.

        Raises RequestError after `close`, and when `close` ends it.
        """
        try:
            self.check_caller()
        except RequestError:
            work.close()
            raise
        call = _Call(work)
        try:
            is_open = self.submit(call.start)
            if is_open:
                call.wait()
        except BaseException:  # Ctrl-C, perhaps before the loop was told anything
            if self.submit(call.cancel):
                call.wait()
            else:
                self._thread.join()
            raise
        if not is_open:
            work.close()
            raise RequestError(_CLOSED)
        return call.result()

    def post(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine and do not wait for it. After `close` there is nothing to do."""
        if not self.submit(_Call(work).start):
            work.close()

    def check_caller(self) -> None:
        """Raises RequestError for who could only wait for ever."""
        if os.getpid() != self._process:
            raise RequestError(
                "the cluster was opened before this process was forked, and stays with the process "
                "that opened it; open another one here"
            )
        if threading.current_thread() is self._thread:
            raise RequestError(
                "a progress function may not call the cluster it is told about; "
                "call it after the load"
            )

    def start(self, callback: Callable[[], object]) -> None:
        """`submit` for who needs it done. Raises RequestError where it cannot be."""
        self.check_caller()
        if not self.submit(callback):
            raise RequestError(_CLOSED)

    def close(self) -> None:
        """Cancel what still runs, then end the thread. May be called again, from any thread.

        Nothing in a forked child: thread and sockets are its parent's.
        """
        if os.getpid() != self._process:
            return
        with self._mutex:
            # What was submitted before becomes a task and is cancelled; nothing comes after it.
            self.submit(self._loop.stop)
            self._is_closed = True
        self._thread.join()

    def submit(self, callback: Callable[[], object]) -> bool:
        """Have the loop call it, after all that was submitted before.

        False once it is closed, and in a forked child.
        """
        if os.getpid() != self._process:
            return False
        with self._mutex:
            if self._is_closed:
                return False
            self._loop.call_soon_threadsafe(callback)
            return True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class _Call(Generic[T]):
    """One coroutine that another thread waits for."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._ended = threading.Event()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        if self._task is None:  # never started
            self._work.close()
            self._ended.set()
        else:
            self._task.cancel()

    def wait(self) -> None:
        while not self._ended.wait(SIGNALS_SEEN_WITHIN_S):
            pass

    def result(self) -> T:
        assert self._task is not None
        if self._task.cancelled():
            raise RequestError("the cluster was closed while this was under way")
        return self._task.result()

    def _on_done(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also where nobody asks for the result
        self._ended.set()
