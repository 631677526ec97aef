"""Signals in an event loop, and the loop itself, on every system."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from edge.system.kind import PORTABLE

Result = TypeVar("Result")

_INPUT_BYTES = 4096

HANGUP: int | None = None
if sys.platform != "win32":
    HANGUP = signal.SIGHUP
"""The signal of a terminal that hung up, also used to read settings again; None: there is none."""

HANGUP_EXIT_CODE = 129
"""128 and the number of SIGHUP, as shells count."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop that watches sockets, which the usual one of Windows cannot."""
    if sys.platform == "win32" or PORTABLE:
        return asyncio.SelectorEventLoop()
    return asyncio.new_event_loop()


def run_in_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, in a loop of `new_event_loop`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(main)
        finally:
            if runner.get_loop() in _waking:
                _no_longer_wake()


def on_signal(loop: asyncio.AbstractEventLoop, number: int, told: Callable[[], object]) -> None:
    """Call `told` in the loop, which runs in the main thread, for each such signal."""
    if sys.platform != "win32" and not PORTABLE:
        loop.add_signal_handler(number, told)
        return

    def handler(_number: int, _frame: FrameType | None) -> None:
        if loop.is_closed():
            no_longer_on_signal(loop, number)
            signal.raise_signal(number)
        else:
            loop.call_soon_threadsafe(told)

    _wake_for_signals(loop)
    signal.signal(number, handler)


_waking: dict[asyncio.AbstractEventLoop, tuple[socket.socket, socket.socket]] = {}
"""The loop that signals wake. Python writes into one of the sockets at each signal, and the loop
reads the other."""


def _wake_for_signals(loop: asyncio.AbstractEventLoop) -> None:
    """End the loop's wait at each signal. Python handles signals between two steps of the main
    thread, and on Windows a signal does not interrupt a wait for sockets."""
    if loop in _waking:
        return
    read, written = socket.socketpair()
    for each in (read, written):
        each.setblocking(False)
    loop.add_reader(read, read.recv, _INPUT_BYTES)
    _no_longer_wake()  # a loop that has ended
    signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    _waking[loop] = read, written


def _no_longer_wake() -> None:
    """Close the sockets of `_wake_for_signals`."""
    if not _waking:
        return
    signal.set_wakeup_fd(-1)
    ((loop, (read, written)),) = _waking.items()
    if not loop.is_closed():
        loop.remove_reader(read)
    read.close()
    written.close()
    _waking.clear()


def no_longer_on_signal(loop: asyncio.AbstractEventLoop, number: int) -> None:
    """The system's own handling of a signal again."""
    if sys.platform != "win32" and not PORTABLE:
        loop.remove_signal_handler(number)
    else:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)


def end_by(number: int) -> None:
    """End this process by a signal, so that the process which started it sees that."""
    os.kill(os.getpid(), number)


def on_end_of_input(loop: asyncio.AbstractEventLoop, told: Callable[[], object]) -> None:
    """Call `told` in the loop once the standard input ends, as a pipe from another process does
    when that process ends.

    A thread reads, because not every system can watch a pipe in a loop.
    """

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, _INPUT_BYTES):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told)

    threading.Thread(target=read, name="edge-input", daemon=True).start()
