"""The time of a file's last use, stored as its time of modification."""

import os
import time
from pathlib import Path


def mark_used(file: int | Path) -> None:
    """Set the last use of a file, by descriptor or path, to now.

    The kernel's own clock for files advances only every few milliseconds, and would lose the order
    of uses in quick succession.
    """
    now_ns = time.time_ns()
    os.utime(file, ns=(now_ns, now_ns))
