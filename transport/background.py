"""A background thread that makes calls one after the other, so that callers need not wait.

Knows nothing of what the calls do.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from edge.transport.errors import ChannelClosedError


class BackgroundWork(Protocol):
    """A call under way."""

    def wait(self) -> None:
        """Return when the call is done; raise what it raised. May be called again."""


class DoneWork:
    """Work that is done already. See :class:`BackgroundWork`."""

    def wait(self) -> None:
        """See :class:`BackgroundWork`."""


class Background:
    """Makes calls in the order they were begun, on a thread that starts with the first.

    After a failed call no later one is made: each fails with the same error.
    """

    def __init__(self, name: str) -> None:
        """``name``: the thread's."""
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def begin(self, function: Callable[[], None]) -> BackgroundWork:
        """Queue a call; raises ``ChannelClosedError`` after :meth:`close`."""
        with self._lock:
            if self._is_closed:
                raise ChannelClosedError("the collective was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            call = _Call(function)
            self._calls.put(call)
        return call

    def close(self) -> None:
        """End the thread once its present call returns. The owner makes that call return."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._calls.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        while (call := self._calls.get()) is not None:
            failure = call.make(failure)


class _Call:
    """A queued call. See :class:`BackgroundWork`."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._done: Future[None] = Future()

    def wait(self) -> None:
        self._done.result()

    def make(self, failure: BaseException | None) -> BaseException | None:
        """Make the call unless ``failure`` is given. Returns the first failure so far."""
        try:
            if failure is not None:
                raise failure
            self._function()
        except BaseException as error:
            self._done.set_exception(error)
            return error
        self._done.set_result(None)
        return None
