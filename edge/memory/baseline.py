"""The baseline: memory of this process before any model is loaded, and its budget."""

from __future__ import annotations

from edge.host.cgroup import memory_left_bytes
from edge.host.free_memory import free_memory_bytes, process_memory, usable_memory_bytes
from edge.memory.ledger import Baseline

LARGE_FRAMES_BYTES = 23 << 20
"""Bytes of frames that are read or wait to be answered, of all coordinators together."""

WORK_BYTES = LARGE_FRAMES_BYTES + (17 << 20)
"""Overhead of a daemon once it works: those frames, mostly pieces of weights on their way to disk,
and 15 to 20 MiB of code and tables of ONNX Runtime that the first session touches."""

USUAL_BASELINE_BYTES = 125 << 20
"""What a daemon's baseline comes to, where there is none to ask: 83 MiB are resident once it
listens."""


def process_baseline() -> Baseline:
    """The baseline, measured now: call it after all imports, and before the process serves."""
    return Baseline(process_bytes=process_memory()["resident_bytes"], work_bytes=WORK_BYTES)


def device_baseline() -> Baseline:
    """The baseline of a device with memory of its own: the process's part counts as used, not as
    free; a step's scratch space comes on top."""
    return Baseline(process_bytes=0, work_bytes=WORK_BYTES)


def budget_bytes(asked_bytes: int | None, baseline: Baseline) -> int:
    """What to promise: what was asked for, as far as the control group leaves it.

    None asks for what is usable; where that is little, for the minimum, if it is free.
    """
    # Of what this process has, only that is surely counted as taken; files may be others' to pay.
    own_bytes = process_memory()["anonymous_bytes"]
    if asked_bytes is None:
        most_bytes = own_bytes + free_memory_bytes()
        return max(own_bytes + usable_memory_bytes(), min(baseline.minimum_bytes, most_bytes))
    left_bytes = memory_left_bytes()
    return asked_bytes if left_bytes is None else min(asked_bytes, own_bytes + left_bytes)
