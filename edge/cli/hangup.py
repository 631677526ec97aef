"""Hangup of the terminal: the program ends without a message."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO

from edge.system.signals import HANGUP_EXIT_CODE


class HungUp(SystemExit):
    """The terminal hung up: closes what is open, and exits as after SIGHUP."""

    def __init__(self) -> None:
        super().__init__(HANGUP_EXIT_CODE)


def give_up(*outputs: TextIO) -> None:
    """Keep Python from another error at exit about unwritten output."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        for output in outputs:
            os.dup2(nowhere.fileno(), output.fileno())
