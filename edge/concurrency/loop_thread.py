"""An event loop in a thread of its own, the base of a blocking API over asynchronous parts."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from edge.errors import RequestError
from edge.system.signals import new_event_loop

T = TypeVar("T")

SIGNALS_SEEN_WITHIN_S = 0.2
"""Longest sleep of a waiting thread at once, in seconds.

Python runs signal handlers between instructions of the main thread. A signal that comes just as
that thread falls asleep, or to another thread, does not wake it: Ctrl-C would be noticed only when
the wait ends.
"""

_CLOSED = "the cluster is closed; open it again"


class LoopThread:
    """Runs coroutines for callers in other threads until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._is_closed = False
        self._process = os.getpid()
        # Re-entrant: a finaliser may `post` during another call of the same thread.
        self._mutex = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C during the start: the thread ends by itself
            with self._mutex:
                self.submit(self._loop.stop)
                self._is_closed = True
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. On Ctrl-C it is cancelled and awaited first.

        Raises RequestError after `close`, and if `close` ends it.
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
        except BaseException:  # Ctrl-C, perhaps before the loop got the work
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
        """Start a coroutine without waiting for it. Does nothing after `close`."""
        if not self.submit(_Call(work).start):
            work.close()

    def check_caller(self) -> None:
        """Raises RequestError for a caller that would wait for itself, or in a forked child."""
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
        """As `submit`, but raises RequestError if the loop is closed."""
        self.check_caller()
        if not self.submit(callback):
            raise RequestError(_CLOSED)

    def close(self) -> None:
        """Cancel running work, then end the thread. May be called again, from any thread.

        Does nothing in a forked child: thread and sockets belong to its parent.
        """
        if os.getpid() != self._process:
            return
        with self._mutex:
            # Earlier submissions become tasks and are cancelled; nothing is accepted after this
            # one.
            self.submit(self._loop.stop)
            self._is_closed = True
        self._thread.join()

    def submit(self, callback: Callable[[], object]) -> bool:
        """Have the loop call `callback` after all earlier ones.

        Returns False once closed, and in a forked child.
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
    """A coroutine that another thread waits for."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._ended = threading.Event()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        if self._task is None:  # not started yet
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
            task.exception()  # marks the error as retrieved, even if nobody asks for the result
        self._ended.set()
