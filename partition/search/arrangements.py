"""Arrangements: the devices of each stage, in order. Lists all of them, or the neighbours of one.

Knows device numbers only; their cost is computed elsewhere.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from edge.partition.cost.message_times import Network
from edge.partition.search.situation import Arrangement, Situation


def all_arrangements(devices: Sequence[int]) -> Iterator[Arrangement]:
    """Every ordered list of ordered groups of some of these devices, fewer devices first."""
    for count in range(1, len(devices) + 1):
        for order in permutations(devices, count):
            for cuts in range(count):
                for bars in combinations(range(1, count), cuts):
                    edges = (0, *bars, count)
                    yield tuple(order[edges[index] : edges[index + 1]] for index in range(cuts + 1))


def neighbours(arrangement: Arrangement, devices: Sequence[int]) -> Iterator[Arrangement]:
    """The arrangements that differ by one change: a stage or device removed, a device added, moved
    or exchanged."""
    used = [index for group in arrangement for index in group]
    unused = [device for device in devices if device not in used]
    for group in arrangement:
        if len(arrangement) > 1:
            yield tuple(other for other in arrangement if other != group)
    for device in unused:
        yield from with_device(arrangement, device)
    for device in used:
        without = _without(arrangement, device)
        if without:
            yield without
            yield from with_device(without, device)
    yield from swaps(arrangement)
    for device in used:
        for other in unused:
            yield _swapped(arrangement, device, other)


def with_device(arrangement: Arrangement, device: int) -> Iterator[Arrangement]:
    """The device as a stage of its own at every place, and as a rank of every group.

    The rank makes little difference, except rank 0 of the last group, where tokens are chosen.
    """
    for place in range(len(arrangement) + 1):
        yield (*arrangement[:place], (device,), *arrangement[place:])
    for number, group in enumerate(arrangement):
        before, after = arrangement[:number], arrangement[number + 1 :]
        yield (*before, (*group, device), *after)
    yield (*arrangement[:-1], (device, *arrangement[-1]))


def swaps(arrangement: Arrangement) -> Iterator[Arrangement]:
    """The arrangement with two of its devices exchanged, where that changes a stage."""
    places = [(number, index) for number, group in enumerate(arrangement) for index in group]
    sampler = arrangement[-1][0]
    for (stage, left), (other_stage, right) in combinations(places, 2):
        if stage != other_stage or left == sampler:
            yield _swapped(arrangement, left, right)


def twins(situation: Situation) -> dict[int, int]:
    """For each device that equals an earlier one in all that counts: that earlier one.

    Arrangements in which twins change places cost the same. So only those are searched in which the
    earlier twin comes first.
    """
    count = len(situation.devices)
    found: dict[int, int] = {}
    for later in range(count):
        for earlier in range(later - 1, -1, -1):
            if _are_twins(situation, earlier, later):
                found[later] = earlier
                break
    return found


def is_canonical(arrangement: Arrangement, twins: dict[int, int]) -> bool:
    """Whether every twin comes after the earlier device that it equals."""
    seen: set[int] = set()
    for group in arrangement:
        for index in group:
            if index in twins and twins[index] not in seen:
                return False
            seen.add(index)
    return True


def canonical(arrangement: Arrangement, twins: dict[int, int]) -> Arrangement:
    """The arrangement with every twin after the earlier device that it equals; it costs the
    same."""
    if not twins:
        return arrangement
    classes: dict[int, list[int]] = {}
    for group in arrangement:
        for index in group:
            classes.setdefault(_first_twin(index, twins), []).append(index)
    members: dict[int, list[int]] = {}
    for index in sorted({*twins, *twins.values()}):
        members.setdefault(_first_twin(index, twins), []).append(index)
    places = {
        index: earlier
        for first, used in classes.items()
        for index, earlier in zip(used, members.get(first, used), strict=False)
    }
    return tuple(tuple(places[index] for index in group) for group in arrangement)


def _first_twin(index: int, twins: dict[int, int]) -> int:
    while index in twins:
        index = twins[index]
    return index


def _swapped(arrangement: Arrangement, left: int, right: int) -> Arrangement:
    """The arrangement with two devices exchanged."""
    places = {left: right, right: left}
    return tuple(tuple(places.get(index, index) for index in group) for group in arrangement)


def _without(arrangement: Arrangement, device: int) -> Arrangement:
    groups = (tuple(index for index in group if index != device) for group in arrangement)
    return tuple(group for group in groups if group)


def _are_twins(situation: Situation, left: int, right: int) -> bool:
    one, other = situation.devices[left], situation.devices[right]
    if (one.memory_bytes, one.rates) != (other.memory_bytes, other.rates):
        return False
    hosts = [device.host for device in situation.devices]
    if one.host != other.host and any(
        host and hosts.count(host) > 1 for host in (one.host, other.host)
    ):
        return False
    network: Network = situation.network
    if network.link(one.id, other.id) != network.link(other.id, one.id):
        return False
    return all(
        network.link(one.id, third.id) == network.link(other.id, third.id)
        and network.link(third.id, one.id) == network.link(third.id, other.id)
        for third in situation.devices
        if third.id not in (one.id, other.id)
    )
