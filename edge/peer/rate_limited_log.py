"""A rate-limited log of failures that other devices can cause."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from edge.protocol.fields import one_line

BURST = 10
"""Lines at once; after them one for each EVERY_S."""

EVERY_S = 60.0


class RateLimitedLog:
    """Logs one line for each failure, without a traceback, at a limited rate."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._left = float(BURST)
        self._last_s = clock()
        self._untold = 0

    def failed(self, what: str, error: BaseException) -> None:
        """Log that `what` failed with `error`."""
        now_s = self._clock()
        self._left = min(BURST, self._left + (now_s - self._last_s) / EVERY_S)
        self._last_s = now_s
        if self._left < 1:
            self._untold += 1
            return
        self._left -= 1
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        untold = f"; {self._untold} more were not told" if self._untold else ""
        self._untold = 0
        self._log.error(
            "%s failed: %s: %s%s%s", what, type(error).__name__, one_line(error), where, untold
        )
