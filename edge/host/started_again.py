"""The command line by which a process of Edge starts another one."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def edge_command(module: str = "edge") -> list[str]:
    """The start of a command line of this Edge with this Python; arguments follow. module: of Edge.

    If the current folder has another package edge, such as a newer clone, Python must not search
    there.
    """
    with contextlib.suppress(OSError):  # the current folder was removed
        if Path(__file__).parents[2].samefile(os.curdir):
            return [sys.executable, "-m", module]
    return [sys.executable, "-P", "-m", module]
