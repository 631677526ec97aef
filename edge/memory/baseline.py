"""The baseline: memory of this process before any model is loaded, and its budget."""

from __future__ import annotations

from edge.host.cgroup import memory_left_bytes
from edge.host.free_memory import free_memory_bytes, process_memory, usable_memory_bytes
from edge.memory.ledger import Baseline

LARGE_FRAMES_BYTES = 23 << 20
"""Bytes of frames that are being read or wait for an answer, of all coordinators together."""

WORK_BYTES = LARGE_FRAMES_BYTES + (17 << 20)
"""Overhead of a working daemon: those frames, mostly pieces of weights before they reach the disk,
and 15 to 20 MiB of ONNX Runtime's code and tables that the first session loads."""

PLAN_RESERVE = 3 / 4
"""Part of the reserve for the user that must still be free where a peer tells what is free."""

LOAD_RESERVE = 1 / 2
"""The same where it loads: free memory changes a little between a plan and its load."""

USUAL_BASELINE_BYTES = 125 << 20
"""A daemon's usual baseline, for plans without a daemon. 83 MiB are resident once it listens."""


def process_baseline() -> Baseline:
    """The baseline of this process, measured now. Call after all imports and before serving."""
    return Baseline(process_bytes=process_memory()["resident_bytes"], work_bytes=WORK_BYTES)


def device_baseline() -> Baseline:
    """The baseline of a device with its own memory, whose free bytes already exclude the process's
    part. Scratch space of steps comes on top."""
    return Baseline(process_bytes=0, work_bytes=WORK_BYTES)


def budget_bytes(
    asked_bytes: int | None, baseline: Baseline, *, reserve: float = 1.0, spare_bytes: int = 0
) -> int:
    """The budget for a request of `asked_bytes`, within the limit of the control group.

    None asks for the usable memory, or for the minimum if that is more and free; of the reserve for
    the user, the part `reserve` is kept then, beside `spare_bytes`.
    """
    # Only anonymous memory is certainly charged to this process; files may be charged to others.
    own_bytes = process_memory()["anonymous_bytes"]
    if asked_bytes is None:
        most_bytes = own_bytes + free_memory_bytes()
        usable_bytes = usable_memory_bytes(reserve=reserve, spare_bytes=spare_bytes)
        return max(own_bytes + usable_bytes, min(baseline.minimum_bytes, most_bytes))
    left_bytes = memory_left_bytes()
    return asked_bytes if left_bytes is None else min(asked_bytes, own_bytes + left_bytes)
