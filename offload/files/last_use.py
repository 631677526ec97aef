"""When a file was last used: its time of modification, which any process can read."""

import os
import time
from pathlib import Path


def mark_used(file: int | Path) -> None:
    """The file was used now. Its descriptor, or its path.

    The kernel's own clock for files stands still for milliseconds: uses that follow one another
    would be one moment, and the order among them lost.
    """
    now_ns = time.time_ns()
    os.utime(file, ns=(now_ns, now_ns))
