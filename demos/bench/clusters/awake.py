"""Keeps cores from falling asleep, for whoever computes on them now and then.

Where devices share a machine, each computes a little and then sleeps longer than a device that has
the machine for itself. A virtual core that sleeps is given away, and a real one turns itself down:
after a millisecond of it the next graph takes 50 us longer, which may be as long as the graph.
So something runs on every core whenever nothing else wants it: divisions, each of which waits for
the one before, which leaves the other half of a core nearly alone.

python -m demos.bench.clusters.awake CORE        ends with its standard input
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path

import numpy as np

_NUMBERS = 1024
"""Few microseconds, in the smallest cache."""

_ROUNDS = 10_000


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # there is none where sessions are no groups
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    ones, results = np.ones(_NUMBERS), np.empty(_NUMBERS)
    print("ready", flush=True)
    while not select.select([sys.stdin], (), (), 0)[0]:
        for _ in range(_ROUNDS):
            np.divide.accumulate(ones, out=results)


if __name__ == "__main__":
    main()
