"""How a process of Edge starts another one."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def edge_command() -> list[str]:
    """By this Python, this Edge; what it is to do follows.

    What is called edge in the folder of this moment may be another one, such as a newer clone: then
    Python is not to look there.
    """
    with contextlib.suppress(OSError):  # the folder is gone
        if Path(__file__).parents[2].samefile(os.curdir):
            return [sys.executable, "-m", "edge"]
    return [sys.executable, "-P", "-m", "edge"]
