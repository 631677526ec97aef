"""How devices of one host slow each other down: shared memory, cores and scheduler.

This does not follow from what each device measures alone. Devices of one stage compute at the same
time and wait for each other at every sum, so one that has no core, or is woken late, delays all. So
some devices of each host run a stage together, and the time beyond the sum of its parts is counted
for each sum. Between two measured numbers of devices, it is interpolated linearly; beyond the
largest, it grows in proportion to the number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from edge.partition.plan.facts import ClusterSpec, DeviceSpec
from edge.partition.plan.rates import between


class Crowds:
    """The measured contention of a cluster's hosts."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._known: dict[str, dict[int, tuple[tuple[int, ...], tuple[float, ...]]]] = {}
        self.links = {each.host: each.link for each in cluster.crowds}
        """By host, (latency in s, bytes per s). All measurements of a host assume the same link."""
        for each in cluster.crowds:
            self._known.setdefault(each.host, {})[each.count] = (each.rows, each.sum_s)

    def sum_s(self, stage: Sequence[DeviceSpec], rows: float) -> float:
        """Seconds that contention adds to each sum of a stage; may be negative."""
        counts = Counter(device.host for device in stage if device.host)
        found = [
            _of_count({n: between(*each, rows) for n, each in self._known[host].items()}, count)
            for host, count in counts.items()
            if count > 1 and host in self._known
        ]
        return max(found, default=0.0)


def _of_count(known: Mapping[int, float], count: int) -> float:
    """At least one count is known; a device alone has no contention."""
    largest = max(known)
    if count >= largest:
        return known[largest] * (count - 1) / (largest - 1)
    low = max((each for each in known if each <= count), default=1)
    high = min(each for each in known if each > count)
    least = known.get(low, 0.0)
    return least + (known[high] - least) * (count - low) / (high - low)


def shares_host(devices: Sequence[DeviceSpec], device: DeviceSpec) -> bool:
    """Whether another of these devices is on the same machine."""
    return any(other.id != device.id and _are_near(other, device) for other in devices)


def _are_near(one: DeviceSpec, other: DeviceSpec) -> bool:
    return bool(one.host) and one.host == other.host
