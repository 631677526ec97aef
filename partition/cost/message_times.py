"""What messages between devices cost: latency plus bytes over rate (Hockney's alpha-beta model).

One function for each pattern of messages in a step. The patterns are those of
`edge.transport.collective` and of the hops between stages. Unmeasured links get a stated default.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from edge.partition.cost.contention import Crowds
from edge.partition.errors import PlanError
from edge.partition.plan.facts import ClusterSpec
from edge.partition.plan.plan import Plan

UNKNOWN_LINK = (0.3e-3, 117e6)
"""Seconds and bytes per second of a link that was not measured: a gigabit network."""

UNKNOWN_LOCAL_LINK = (20e-6, 2e9)
"""The same between two devices of one host."""

NO_LINK_S = 1e9
"""Latency that stands for two devices that cannot reach each other. A plan that takes longer is
impossible."""

EAGER_BYTES = 32 << 10
"""Sums up to here are sent to all before anything is received; see `transport`."""

SLICED_ABOVE_BYTES = 64 << 10
"""Sums above this are reduced in slices by more than two ranks; see `transport`."""


class Network:
    """The links of a cluster, by direction, with defaults for unmeasured ones.

    Devices of a host with a measured CrowdSpec have the link that the CrowdSpec assumed.
    Measurements of such a link vary fourfold, depending on whether the waiting thread sleeps. A
    CrowdSpec is the time of a step minus its messages, so both must use one link.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._known = {
            (link.source, link.target): (link.latency_s, link.bytes_per_s) for link in cluster.links
        }
        self._hosts = {device.id: device.host for device in cluster.devices}
        self.crowds = Crowds(cluster)

    def link(self, source: str, target: str) -> tuple[float, float]:
        """(latency in s, bytes per s). A link measured only the other way counts for both."""
        if source == target:
            return UNKNOWN_LOCAL_LINK
        found = self._known.get((source, target)) or self._known.get((target, source))
        host = self._hosts[source] if self._hosts[source] == self._hosts[target] else ""
        if host in self.crowds.links and (found is None or found[0] < NO_LINK_S):
            return self.crowds.links[host]
        return found or (UNKNOWN_LOCAL_LINK if host else UNKNOWN_LINK)

    def is_linked(self, one: str, other: str) -> bool:
        """Whether the two devices can reach each other."""
        return max(self.link(one, other)[0], self.link(other, one)[0]) < NO_LINK_S

    def message_s(self, source: str, target: str, nbytes: float) -> float:
        latency_s, bytes_per_s = self.link(source, target)
        return latency_s + nbytes / bytes_per_s

    def sum_s(self, devices: Sequence[str], nbytes: float) -> float:
        """One sum of an array of `nbytes` over these devices; the slowest decides.

        2 devices    both send and receive at once: one message.
        small sums   every device sends to all, then receives from all: one latency, n - 1 arrays.
        middle       exchanges with all others, one after the other: n - 1 rounds, or n for an odd
                     n, because then one device rests in each round.
        large        the same twice, with slices of 1 / n: first to sum, then to gather.
        """
        count = len(devices)
        if count < 2:
            return 0.0
        ranks = [
            (device, [*devices[:rank], *devices[rank + 1 :]]) for rank, device in enumerate(devices)
        ]
        if count > 2 and nbytes > SLICED_ABOVE_BYTES:
            return 2 * max(self._exchanges_s(*each, nbytes / count) for each in ranks)
        if count > 2 and nbytes <= EAGER_BYTES:
            return max(self._eager_s(*each, nbytes) for each in ranks)
        return max(self._exchanges_s(*each, nbytes) for each in ranks)

    def hop_s(self, sources: Sequence[str], targets: Sequence[str], nbytes: float) -> float:
        """Seconds to send the hidden state from a stage to the next. Rank j receives from rank j
        mod n of the stage before.

        A sender serves its ranks in turn; the stage starts when the last rank has received.
        """
        slowest = 0.0
        for index, source in enumerate(sources):
            links = [
                self.link(source, target)
                for number, target in enumerate(targets)
                if number % len(sources) == index
            ]
            if links:
                latency_s = max(latency for latency, _ in links)
                slowest = max(slowest, latency_s + sum(nbytes / rate for _, rate in links))
        return slowest

    def hop_busy_s(self, sources: Sequence[str], targets: Sequence[str], nbytes: float) -> float:
        """Seconds that a hop keeps both of its ends busy: all of it but the latency."""
        return max(
            sum(
                nbytes / self.link(source, target)[1]
                for number, target in enumerate(targets)
                if number % len(sources) == index
            )
            for index, source in enumerate(sources)
        )

    def _exchanges_s(self, device: str, others: Sequence[str], nbytes: float) -> float:
        exchanges_s = sum(
            max(self.message_s(device, other, nbytes), self.message_s(other, device, nbytes))
            for other in others
        )
        rounds = len(others) + (len(others) % 2 == 0)
        return exchanges_s * rounds / len(others)

    def _eager_s(self, device: str, others: Sequence[str], nbytes: float) -> float:
        latency_s = max(self.link(other, device)[0] for other in others)
        sending_s = sum(nbytes / self.link(device, other)[1] for other in others)
        receiving_s = sum(nbytes / self.link(other, device)[1] for other in others)
        return latency_s + max(sending_s, receiving_s)


def check_links(plan: Plan, cluster: ClusterSpec) -> None:
    """Raise PlanError, with every pair, if devices that exchange messages cannot reach each
    other."""
    network = Network(cluster)
    problems = [
        f"{cluster.device(one).name} and {cluster.device(other).name} cannot reach each other, so"
        " they cannot share a model; see that each can open connections to the other, or use only"
        " one of them."
        for one, other in dict.fromkeys(_pairs(plan))
        if not network.is_linked(one, other)
    ]
    if problems:
        raise PlanError(problems)


def _pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pairs of devices that exchange messages, each pair in one direction."""
    groups = [[shard.device for shard in stage.shards] for stage in plan.stages]
    found = [pair for group in groups for pair in combinations(group, 2)]
    for before, after in pairwise(groups):
        found += [(before[rank % len(before)], each) for rank, each in enumerate(after)]
    # The sampler sends the token to all shards.
    found += [(groups[-1][0], each) for group in groups for each in group]
    yield from ((min(pair), max(pair)) for pair in found if pair[0] != pair[1])
