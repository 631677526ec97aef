"""Answers of other processes of this Edge: a driver that crashes or hangs there costs this one
nothing but time."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

_MOST_ANSWER_BYTES = 1 << 20


class NoAnswerError(Exception):
    """The process gave no answer. The message continues a sentence about it."""


def answer_of(command: Sequence[str], *, most_s: float) -> bytes:
    """The answer of a process that calls `answer_parent`, not checked; cut after its most bytes.

    Raises NoAnswerError.
    """
    is_late = threading.Event()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:

        def end_it() -> None:
            is_late.set()
            process.kill()

        limit = threading.Timer(most_s, end_it)
        limit.daemon = True
        limit.start()
        try:
            assert process.stdout is not None, "a pipe"
            answer = process.stdout.read(_MOST_ANSWER_BYTES + 1)
            if len(answer) <= _MOST_ANSWER_BYTES:
                process.wait()
        finally:
            limit.cancel()
            process.kill()
    if is_late.is_set():
        raise NoAnswerError(f"it did not answer within {most_s:g} s")
    if not answer:
        raise NoAnswerError(f"its process ended with exit code {process.returncode}")
    return answer


def answer_parent(work: Callable[[], object]) -> NoReturn:
    """Do the work, print its result for the process that waits for it, and end this process."""
    answer = os.dup(1)
    os.dup2(2, 1)  # drivers print, too
    result = msgspec.json.encode(work())
    with os.fdopen(answer, "wb") as file:
        file.write(result)
    os._exit(0)  # without unloading drivers, which may crash
