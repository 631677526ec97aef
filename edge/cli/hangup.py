"""A terminal that goes away while a program uses it: the program ends, and says nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
from pathlib import Path
from typing import TextIO

_STANDARD_STREAMS = (0, 1, 2)


class HungUp(SystemExit):
    """All that is open closes on its way; it ends as what SIGHUP has ended."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGHUP)


def has_hung_up() -> bool:
    """One of our streams was a terminal that is there no more: the kernel says so of no other."""
    for descriptor in _STANDARD_STREAMS:
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def give_up(*outputs: TextIO) -> None:
    """Python must not complain once more, at exit, about what could not be written there."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        for output in outputs:
            os.dup2(nowhere.fileno(), output.fileno())
