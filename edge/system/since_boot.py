"""A clock that, unlike the event loop's, runs while the device is suspended."""

import sys
import time

from edge.system.kind import PORTABLE


def since_boot_s() -> float:
    """Seconds since the device was started, or since some other moment where the system does not
    count them; the difference of two values counts."""
    if sys.platform == "linux" and not PORTABLE:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    # macOS: mach_continuous_time is not in Python. A changed clock counts as a suspension there,
    # which only makes a connection be looked at once more.
    return time.time()
