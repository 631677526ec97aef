"""Peers whose speed is known: nothing is measured where the speed is not what is tested.

Measuring a model takes a peer seconds, and trials of several peers together take longer. Here each
peer says the same at once, and no trial is made; links are measured. What it says is remembered as
if it had been measured.

As a program, `edge` itself, or a file of Python's: python -m tests.support.known_rates peers
"""

from __future__ import annotations

import gc
import runpy
import sys
from collections.abc import Callable
from typing import Any

from edge.cli.main import main
from edge.partition import ComputeRates
from edge.planning import cluster_profile
from edge.protocol.measurements import PeerProfile

PROFILE = PeerProfile(
    rates=ComputeRates(
        rows=(1, 64),
        seconds_per_byte=(2e-10, 2e-9),
        shared_seconds_per_byte=(2e-10, 2e-9),
        slice_seconds_per_byte=(2e-10, 2e-9),
        attention_slice_s=(5e-6, 5e-5),
        feed_forward_slice_s=(5e-6, 5e-5),
        attention_s=(1e-9, 1e-9),
        run_s=2e-5,
        jitter=0.1,
        sample_s=2e-5,
        step_s=1e-4,
        disk_bytes_per_s=1e9,
    ),
    sample_bytes=1 << 20,
    sample="known beforehand",
    spread=0.0,
    is_unsteady=False,
    busy=(),
)


def know_rates(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """In this process for good, or for as long as `put` says."""

    async def alone(*_: Any) -> PeerProfile:
        return PROFILE

    async def no_trial(*_: Any) -> None:
        """As where the peers have no memory left for one."""

    put(cluster_profile._Rates, "_alone", alone)
    put(cluster_profile, "rehearse", no_trial)


if __name__ == "__main__":
    know_rates()
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        gc.enable()  # `edge` does so itself, where it was begun without
        runpy.run_path(sys.argv[1], run_name="__main__")
    else:
        main()
