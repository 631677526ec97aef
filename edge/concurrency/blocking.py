"""Blocking work next to an event loop, without leaving a thread or a half-done clean-up behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - not an error: it is how a thread ends early
    """Raised inside blocking work whose caller has gone."""


class StopFlag:
    """Tells blocking work, which cannot be cancelled, that nobody waits for it any more."""

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
) -> T:
    """The result of `work`, which runs in a thread.

    `asyncio.to_thread` returns at once when it is cancelled, and its thread goes on using files
    that the caller is about to close. This calls `stop`, waits for the thread's end, hands the
    result that nobody takes any more to `discard`, and only then raises CancelledError.
    """
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(None, lambda: context.run(work))
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
        del future  # its error's traceback has this frame: a cycle, with all that `work` knows


@contextlib.asynccontextmanager
async def held(
    opening: Callable[[], AbstractContextManager[T]],
    *,
    stop: Callable[[], object] | None = None,
) -> AsyncIterator[T]:
    """What `opening` makes, entered and left in threads, as `run_blocking` has it."""
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
    """The result of `work`, which runs to its end also when this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _settled(task)
        if not task.cancelled():
            task.exception()  # seen; being cancelled counts for more
        raise
    finally:
        del task  # likewise


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, however often this task is cancelled."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
