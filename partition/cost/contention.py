"""What devices of one host take from each other, because they read the same memory.

Measured is how long a device takes for a byte alone, and how long while all the others of its host
do as it does. Between two sums they do not: whoever has little to read is soon done, and then the
memory serves the others. So what a device loses is counted by the bytes that its neighbours read:

    seconds = own x its bytes + taken x their bytes

Over the time of the measurement each neighbour j reads 1 / shared_j bytes a second, which gives
`taken`. In a split stage all bytes together are always the same, so the time is a line in a
device's own bytes, which is what a search needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partition.plan.facts import DeviceSpec

_MOST_TAKEN = 0.9
"""Of what would mean that the memory serves one device at a time: then no share would matter."""


@dataclass(frozen=True, slots=True)
class MemoryRate:
    """Seconds for a byte of weights between two sums of a stage."""

    own_s: float
    """For each byte that the device reads."""
    stage_s: float = 0.0
    """For each byte that all shards of the stage read together, the device among them."""

    def times(self, factor: float) -> "MemoryRate":
        return MemoryRate(self.own_s * factor, self.stage_s * factor)

    def seconds(self, own_bytes: float, stage_bytes: float) -> float:
        return own_bytes * self.own_s + stage_bytes * self.stage_s


def memory_rate(
    device: DeviceSpec, stage: Sequence[DeviceSpec], host: Sequence[DeviceSpec], rows: float
) -> MemoryRate:
    """Of `device` in a step of `rows` rows, beside the others of `stage`, on the host of `host`.

    Those of `host` on the same machine were measured together; the devices of `stage` have rates.
    Where the stage is on several hosts, each is taken to read as much of it as it is fast.
    """
    rates = device.rates
    assert rates is not None
    alone_s, shared_s = (rates.weights_s(rows, shared=shared) for shared in (False, True))
    others = sum(
        _speed(other, rows)
        for other in host
        if other.id != device.id and _are_near(other, device) and other.rates is not None
    )
    if not shares_host(stage, device) or not others or shared_s <= alone_s:
        return MemoryRate(alone_s)
    serial_s = 1 / (1 / shared_s + others)
    taken_s = min((1 - alone_s / shared_s) / others, _MOST_TAKEN * serial_s)
    near = sum(_speed(each, rows) for each in stage if each.host == device.host)
    part = near / sum(_speed(each, rows) for each in stage)
    return MemoryRate(shared_s * (1 - taken_s * others) - taken_s, taken_s * part)


def shares_host(devices: Sequence[DeviceSpec], device: DeviceSpec) -> bool:
    """Whether another of these devices reads the same memory."""
    return any(other.id != device.id and _are_near(other, device) for other in devices)


def _are_near(one: DeviceSpec, other: DeviceSpec) -> bool:
    return bool(one.host) and one.host == other.host


def _speed(device: DeviceSpec, rows: float) -> float:
    """Bytes per second beside its neighbours."""
    assert device.rates is not None
    return 1 / device.rates.weights_s(rows, shared=True)
