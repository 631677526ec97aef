"""Signals that come at an awkward moment."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import poll_until


@contextlib.contextmanager
def ctrl_c_once_asleep(function: str) -> Iterator[None]:
    """Ctrl-C, once, when the main thread sleeps in `function`, which that does not wake up.

    The system may hand a signal to any thread, but the handler runs in the main one. What it gets
    as it falls asleep does not wake it, either.
    """
    main = threading.main_thread()
    state = Path(f"/proc/self/task/{main.native_id}/stat")

    def is_asleep() -> bool:
        assert main.ident is not None
        frame = sys._current_frames()[main.ident]
        return frame.f_code.co_name == function and state.read_text().split()[2] == "S"

    def press() -> None:
        poll_until(is_asleep)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
