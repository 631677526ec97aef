"""Signals in an event loop, by the way that every system has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_WITHIN_S = 20.0

_TOLD = """
import asyncio, signal, threading, time
from edge.system.signals import on_signal, run_in_loop

def send():
    # To this thread: what the main thread waits for is not interrupted, as on Windows.
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

async def main():
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(asyncio.get_running_loop(), number, told.set)
    threading.Thread(target=send).start()
    await told.wait()
    print("told", flush=True)

run_in_loop(main())
signal.raise_signal(signal.SIGTERM)
print("not ended")
"""


def test_a_signal_wakes_a_loop_that_waits_and_later_ends_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _TOLD],
        env={**os.environ, "EDGE_PORTABLE": "1"},
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "told\n"), ended.stderr
