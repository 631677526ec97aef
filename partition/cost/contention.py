"""What devices of one host take from each other: memory, cores, and the scheduler's attention.

None of it follows from what each measures alone. Where they share a stage they compute at the same
time and wait for each other at every sum: whoever has no core then, or is woken late, holds up all.
So a few of them have run a stage together, and what that took longer than its parts is counted for
each sum. For counts that nobody tried it lies on the line between two that were; with more devices
than ever tried it grows as their number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from edge.partition.plan.facts import ClusterSpec, DeviceSpec
from edge.partition.plan.rates import between


class Crowds:
    """What was measured of a cluster's hosts."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._known: dict[str, dict[int, tuple[tuple[int, ...], tuple[float, ...]]]] = {}
        self.links = {each.host: each.link for each in cluster.crowds}
        """By host, (latency in s, bytes per s); those of a host were all counted with the same."""
        for each in cluster.crowds:
            self._known.setdefault(each.host, {})[each.count] = (each.rows, each.sum_s)

    def sum_s(self, stage: Sequence[DeviceSpec], rows: float) -> float:
        """What the hosts of a stage's devices add to each of its sums; perhaps less than 0."""
        counts = Counter(device.host for device in stage if device.host)
        found = [
            _of_count({n: between(*each, rows) for n, each in self._known[host].items()}, count)
            for host, count in counts.items()
            if count > 1 and host in self._known
        ]
        return max(found, default=0.0)


def _of_count(known: Mapping[int, float], count: int) -> float:
    """At least one count is known; a device alone has no company."""
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
