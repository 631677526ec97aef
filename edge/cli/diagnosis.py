"""What is wrong with a device and the peers that it finds, from facts gathered before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edge.host.free_memory import format_size
from edge.protocol.peer_info import PeerInfo

LOW_MEMORY_BYTES = 512 << 20
"""A daemon's process alone takes about 125 MiB, and a small model some hundreds."""

LOW_DISK_BYTES = 1 << 30

_ADDRESS = re.compile(
    r"\[?(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*(?::[0-9a-fA-F]*){2,7})\]?(:\d+)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """This machine, as it was found."""

    versions: Mapping[str, str]
    """Of Edge, Python and the packages that compute, by name."""
    instructions: tuple[str, ...]
    """Sets of the processor that matter to products of ONNX Runtime; empty: not known."""
    free_memory_bytes: int
    cache_folder: str
    cache_failure: str | None
    """Why nothing can be written there; None: something can."""
    free_disk_bytes: int
    listen: str
    listen_failure: str | None
    multicast: Mapping[str, str | None]
    """Why it does not work, by interface; None: it works. Without loopback."""
    has_token: bool
    """A token file makes it a member of its cluster."""
    membership_failure: str | None
    num_met: int
    """Devices that it was paired with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    found: str
    remedy: str | None = None
    """None: nothing is wrong."""


def device_findings(facts: DeviceFacts, *, finds_peers: bool) -> Iterator[Finding]:
    """This machine alone. A device that finds peers need not be paired: they are on it."""
    yield Finding(
        subject="versions", found=", ".join(f"{name} {v}" for name, v in facts.versions.items())
    )
    yield Finding(subject="instructions", found=", ".join(facts.instructions) or "not known")
    yield Finding(
        subject="memory",
        found=f"{format_size(facts.free_memory_bytes)} free",
        remedy="End programs that take much memory, or use this device only to ask others."
        if facts.free_memory_bytes < LOW_MEMORY_BYTES
        else None,
    )
    yield _cache(facts)
    yield Finding(
        subject="listening",
        found=f"a daemon can listen on {facts.listen}"
        if facts.listen_failure is None
        else f"a daemon cannot listen on {facts.listen}: {facts.listen_failure}",
        remedy=None
        if facts.listen_failure is None
        else "End what listens there, or give edge peer --listen another port; 0 is any free one.",
    )
    if not facts.multicast:
        yield Finding(
            subject="network",
            found="no interface with an IPv4 address is up, except loopback",
            remedy="Connect this device to the network of the others.",
        )
    for name, failure in facts.multicast.items():
        yield Finding(
            subject=f"multicast on {name}",
            found="works" if failure is None else failure,
            remedy=None
            if failure is None
            else "Allow multicast (UDP port 5353) in the firewall, or name peers by --peer "
            "HOST:PORT.",
        )
    yield _pairing(facts, finds_peers=finds_peers)


def _cache(facts: DeviceFacts) -> Finding:
    remedy = None
    found = f"{facts.cache_folder}, {format_size(facts.free_disk_bytes)} free"
    if facts.cache_failure is not None:
        found = f"{facts.cache_folder} cannot be written: {facts.cache_failure}"
        remedy = "Make the folder writable, or name another one by EDGE_CACHE."
    elif facts.free_disk_bytes < LOW_DISK_BYTES:
        remedy = "Free some of the disk, or name a folder on another one by EDGE_CACHE."
    return Finding(subject="cache", found=found, remedy=remedy)


def _pairing(facts: DeviceFacts, *, finds_peers: bool) -> Finding:
    if facts.membership_failure is not None:
        return Finding(
            subject="pairing",
            found=facts.membership_failure,
            remedy="Put the files named in order, or pair this device anew by edge pair.",
        )
    found = f"paired with {facts.num_met} by edge pair" if facts.num_met else "with no other device"
    is_alone = not (facts.has_token or facts.num_met or finds_peers)
    return Finding(
        subject="pairing",
        found="a member by a token file" if facts.has_token else found,
        remedy="Run edge pair here and on another device." if is_alone else None,
    )


def peer_findings(
    peers: Sequence[PeerInfo], failure: str | None, *, software: str
) -> Iterator[Finding]:
    """The peers, and why there are none.

    failure: what looking for them ended with. software: the version of Edge that looks.
    """
    if failure is not None:
        yield Finding(
            subject="peers",
            found=failure,
            remedy="Run edge doctor on those devices, too; edge peer and edge pair start there.",
        )
    for peer in peers:
        remedy = None
        if peer.software != software:
            remedy = f"Install the same version of Edge on both: {software} is here."
        elif peer.free_bytes <= 0:
            remedy = "End a model that it runs, or give it more by edge memory."
        yield Finding(
            subject=f"peer {peer.name}",
            found=f"Edge {peer.software}, {peer.backend}, {peer.threads} threads, "
            f"{format_size(peer.free_bytes)} of {format_size(peer.memory_bytes)} free",
            remedy=remedy,
        )


def fit_for_strangers(finding: Finding, addresses: Sequence[str], home: str) -> Finding:
    """The same without network addresses, those given by the user too, and the home folder."""
    found = finding.found
    for address in addresses:
        found = found.replace(address, "ADDRESS").replace(address.rpartition(":")[0], "ADDRESS")
    found = _ADDRESS.sub("ADDRESS", found.replace(home, "~"))
    return replace(finding, found=found)
