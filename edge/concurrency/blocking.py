"""Blocking work next to an event loop, safe under cancellation: no thread or clean-up is left
behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - not an error: it is how a thread ends early
    """Raised inside blocking work whose caller was cancelled."""


class StopFlag:
    """A flag that tells blocking work to stop, since threads cannot be cancelled."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises Stopped once the flag is set."""
        if self._event.is_set():
            raise Stopped


async def run_blocking(
    work: Callable[[], T],
    *,
    stop: Callable[[], object] | None = None,
    discard: Callable[[T], object] | None = None,
    threads: Executor | None = None,
) -> T:
    """The result of `work`, run in a thread: of `threads`, for work that may take minutes, else of
    those that all share.

    A cancelled `asyncio.to_thread` returns at once, while its thread still uses files that the
    caller is about to close. This function calls `stop`, waits for the thread, passes an unused
    result to `discard`, and only then raises CancelledError.
    """
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(work))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await _settled(future)
        if future.exception() is None and discard is not None:
            discard(future.result())
        raise
    finally:
        del future  # its traceback holds this frame: a cycle with all that `work` references


@contextlib.asynccontextmanager
async def held(
    opening: Callable[[], AbstractContextManager[T]],
    *,
    stop: Callable[[], object] | None = None,
) -> AsyncIterator[T]:
    """A context manager made by `opening`, entered and left in threads by `run_blocking`."""
    stack = contextlib.ExitStack()
    entered = await run_blocking(
        lambda: stack.enter_context(opening()), stop=stop, discard=lambda _: stack.close()
    )
    try:
        yield entered
    except BaseException as error:
        await run_blocking(partial(stack.__exit__, type(error), error, error.__traceback__))
        raise
    await run_blocking(stack.close)


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs to its end even if this task is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _settled(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved: the cancellation takes precedence
        raise
    finally:
        del task  # breaks the same cycle


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, however often this task is cancelled."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
