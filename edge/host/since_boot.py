"""A clock that goes on while the host is suspended, as the event loop's does not."""

from __future__ import annotations

import time


def since_boot_s() -> float:
    """Seconds since the host was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
