"""A cluster with one change made to it, given as text."""

import re
from dataclasses import replace

from edge.partition.plan.facts import ClusterSpec, DeviceSpec, LinkSpec

_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"Kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}

_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
_MEMORY = re.compile(rf"([+-])\s*{_NUMBER}\s*([A-Za-z]+) on (.+)", re.DOTALL)
_WITHOUT = re.compile(r"without (.+)", re.DOTALL)
_LINK = re.compile(rf"link (.+) {_NUMBER}\s*(us|µs|ms|s) {_NUMBER}\s*([A-Za-z]+)", re.DOTALL)

_EXAMPLES = "'+4GiB on NAME', '-1GiB on NAME', 'link NAME-NAME 1ms 1Gbit' or 'without NAME'"
_LONGEST = 4096
"""The most characters of a change."""


def what_if(cluster: ClusterSpec, text: str) -> ClusterSpec:
    """The cluster with one change made to it. `text` names devices by name or id.

        +4GiB on b             more memory, or with - less, down to 0
        link a-b 1ms 1Gbit     latency and rate of the link, in both directions
        without c              the cluster without the device

    ValueError: an unknown change, an unknown device, or a name that several devices have.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"A change has at most {_LONGEST} characters, not {len(text):,}.")
    text = text.strip()
    if found := _MEMORY.fullmatch(text):
        return _with_memory(cluster, *found.groups())
    if found := _LINK.fullmatch(text):
        return _with_link(cluster, *found.groups())
    if found := _WITHOUT.fullmatch(text):
        device = _device(cluster, found[1])
        if len(cluster.devices) == 1:
            raise ValueError(f"Without {device.name!r} there is no device left.")
        return cluster.without(device.id)
    raise ValueError(f"{text[:80]!r} is not a known change; write {_EXAMPLES}.")


def _with_memory(cluster: ClusterSpec, sign: str, amount: str, unit: str, name: str) -> ClusterSpec:
    device = _device(cluster, name)
    change = round(float(amount) * _unit(_SIZES, unit))
    memory_bytes = max(0, device.memory_bytes + (change if sign == "+" else -change))
    changed = replace(device, memory_bytes=memory_bytes)
    devices = tuple(changed if each.id == device.id else each for each in cluster.devices)
    return replace(cluster, devices=devices)


def _with_link(
    cluster: ClusterSpec, names: str, latency: str, time_unit: str, rate: str, rate_unit: str
) -> ClusterSpec:
    one, other = _pair(cluster, names)
    latency_s = float(latency) * _TIMES[time_unit]
    bytes_per_s = float(rate) * _unit(_BITS, rate_unit) / 8
    ends = {one.id, other.id}
    kept = [link for link in cluster.links if {link.source, link.target} != ends]
    new = [
        LinkSpec(source=source, target=target, latency_s=latency_s, bytes_per_s=bytes_per_s)
        for source, target in ((one.id, other.id), (other.id, one.id))
    ]
    return replace(cluster, links=(*kept, *new))


def _pair(cluster: ClusterSpec, names: str) -> tuple[DeviceSpec, DeviceSpec]:
    """The devices of `a-b`. Names may contain hyphens, so every hyphen is tried."""
    found: list[tuple[DeviceSpec, DeviceSpec]] = []
    known = {text for device in cluster.devices for text in (device.id, device.name)}
    for index, character in enumerate(names):
        left, right = names[:index].strip(), names[index + 1 :].strip()
        if character == "-" and left in known and right in known:
            found.append((_device(cluster, left), _device(cluster, right)))
    if len(found) != 1 or found[0][0].id == found[0][1].id:
        raise ValueError(f"{names[:80]!r} does not name two devices, as in 'link NAME-NAME'.")
    return found[0]


def _device(cluster: ClusterSpec, name: str) -> DeviceSpec:
    name = name.strip()
    for device in cluster.devices:
        if device.id == name:
            return device
    named = [device for device in cluster.devices if device.name == name]
    if len(named) == 1:
        return named[0]
    if named:
        raise ValueError(f"{len(named)} devices are called {name[:80]!r}; use the id of one.")
    known = ", ".join(device.name for device in cluster.devices[:16])
    raise ValueError(f"There is no device {name[:80]!r} in the cluster; there are {known}.")


def _unit(units: dict[str, int] | dict[str, float], unit: str) -> float:
    by_case = {each.lower(): factor for each, factor in units.items()}
    if unit.lower() not in by_case:
        raise ValueError(f"{unit[:20]!r} is not a known unit; use one of {', '.join(units)}.")
    return by_case[unit.lower()]
