"""A clock that, unlike the event loop's, runs while the host is suspended."""

from __future__ import annotations

import time


def since_boot_s() -> float:
    """Seconds since the host was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
