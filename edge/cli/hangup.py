"""Hangup of the terminal: the program ends without a message."""

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
    """The terminal hung up: closes what is open, and exits as after SIGHUP."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGHUP)


def has_hung_up() -> bool:
    """Whether a standard stream is a terminal that has hung up."""
    for descriptor in _STANDARD_STREAMS:
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def give_up(*outputs: TextIO) -> None:
    """Keep Python from another error at exit about unwritten output."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        for output in outputs:
            os.dup2(nowhere.fileno(), output.fileno())
