"""The findings of `edge doctor` about a device and its peers, from gathered facts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edge.errors import EdgeError, ProtocolError
from edge.host.free_memory import format_size
from edge.host.gpu_adapters import GpuAdapter, NoAdapter
from edge.host.interfaces import Interface
from edge.protocol.measurements import LinkTimes
from edge.protocol.peer_info import PeerInfo

LOW_MEMORY_BYTES = 512 << 20
"""Least free memory: a daemon's process takes about 125 MiB, and a small model some hundreds."""

LOW_DISK_BYTES = 1 << 30

_BEST_FIRST = (
    ("AMX", {"amx_int8"}),
    ("AVX-512 VNNI", {"avx512f", "avx512_vnni"}),
    ("AVX-512", {"avx512f"}),
    ("AVX VNNI", {"avx2", "avx_vnni"}),
    ("AVX2", {"avx2"}),
    ("NEON with products of matrices", {"asimddp", "i8mm"}),
    ("NEON with dot products", {"asimddp"}),
)

_HAS_AVX512 = r"Xeon\(R\) (?:Platinum|Gold|Silver|Bronze)|EPYC [89][\dA-Z]{3}"
"""Server processors, all of which have AVX-512."""

_FAST_ETHERNET = (60e6, 100e6)
"""Bits per second of data over a path with a part of 100 Mbit/s."""

_SLOW_PART = (
    "One part of the path does 100 Mbit/s only: a cable with a broken wire (take category 5e or "
    "better), a port of the switch, or the interface at one end."
)

_LEAST_OF_CLASS = 0.5
"""Least part of an interface's rate: Ethernet carries 94 % data, and other traffic takes some."""

_MOST_CLOCK_S = 5.0
"""Most seconds between two clocks. With more, the events of two logs are in the wrong order."""

_MOST_OFFERED = 1.1
"""Part of free memory that may be offered: a daemon gives memory back some time after a model."""

_SLOW_WIFI_BITS_PER_S = 100e6
_LONG_LATENCY_S = 3e-3
"""Most latency of a wired link; two to three switches take less than a tenth of it."""

_ADAPTER = "graphics adapter"

_ADDRESS = re.compile(
    r"\[?(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*(?::[0-9a-fA-F]*){2,7})\]?(:\d+)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The facts of this machine."""

    versions: Mapping[str, str]
    """Versions of Edge, Python and the packages that compute, by name."""
    is_x86: bool
    instructions: tuple[str, ...]
    """The processor's instruction sets that speed up ONNX Runtime's products; empty: unknown."""
    processor: str
    """The processor's model name; empty: unknown."""
    is_virtual: bool
    """A virtual machine, which may hide instructions of its processor."""
    cores: int
    """The cores that this process may run on."""
    quota_cores: float | None
    """Cores' worth of time that the control group allows; None: all."""
    free_memory_bytes: int
    machine_free_bytes: int
    """Free memory of the machine, regardless of the control group's limit."""
    adapters: tuple[GpuAdapter, ...]
    """Graphics adapters, software ones too."""
    no_adapter: NoAdapter | None
    """Why there is none but software ones; None: there is one."""
    num_cuda_devices: int
    has_triton: bool
    """Whether the packages of the back end triton are installed."""
    has_webgpu: bool
    cache_folder: str
    cache_failure: str | None
    """Why the folder is not writable; None: it is."""
    free_disk_bytes: int
    listen: str
    listen_failure: str | None
    multicast: Mapping[str, str | None]
    """Why multicast fails, by interface; None: it works. Without loopback."""
    has_token: bool
    """Whether its membership comes from a token file."""
    membership_failure: str | None
    met: Mapping[str, str]
    """The names of paired devices, by id."""
    host: str
    """The names of peers on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    subject: str
    found: str
    remedy: str | None = None
    """None: nothing is wrong."""


def device_findings(facts: DeviceFacts, *, finds_peers: bool) -> Iterator[Finding]:
    """Findings about this machine. finds_peers: some were found here, so it need not be paired."""
    yield Finding(
        subject="versions", found=", ".join(f"{name} {v}" for name, v in facts.versions.items())
    )
    yield _instructions(facts)
    yield _cores(facts)
    yield _memory(facts)
    yield from _adapters(facts)
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
            found="no interface with an address is up, except loopback",
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


def _instructions(facts: DeviceFacts) -> Finding:
    """The instruction set that ONNX Runtime uses."""
    has = set(facts.instructions)
    best = next((name for name, sets in _BEST_FIRST if sets <= has), None)
    found = "not known" if best is None else f"ONNX Runtime computes with {best}"
    if facts.instructions:
        found += f" ({', '.join(facts.instructions)})"
    remedy = None
    if facts.is_virtual:
        hidden = []
        if facts.is_x86 and "avx2" not in has:
            hidden.append("AVX2")
        if "avx512f" not in has and re.search(_HAS_AVX512, facts.processor):
            hidden.append("AVX-512")
        if hidden:
            found += f"; the virtual machine hides {' and '.join(hidden)} of its processor"
            remedy = (
                "Have the virtual machine pass on its processor's instructions (CPU type host, or "
                "host-passthrough): products take several times as long without them."
            )
    return Finding(subject="instructions", found=found, remedy=remedy)


def _cores(facts: DeviceFacts) -> Finding:
    if facts.quota_cores is None or facts.quota_cores >= facts.cores:
        return Finding(subject="cores", found=str(facts.cores))
    return Finding(
        subject="cores",
        found=f"{facts.cores}, of which the control group leaves the time of {facts.quota_cores:g} "
        "(a limit of the container, or CPUQuota= of the unit)",
    )


def _memory(facts: DeviceFacts) -> Finding:
    found, remedy = f"{format_size(facts.free_memory_bytes)} free", None
    is_limited = facts.free_memory_bytes < facts.machine_free_bytes
    if is_limited:
        found += (
            f"; the control group leaves no more of the machine's "
            f"{format_size(facts.machine_free_bytes)}"
        )
    if facts.free_memory_bytes < LOW_MEMORY_BYTES:
        remedy = "End programs that take much memory, or use this device only to ask others."
        if is_limited:
            remedy = "Raise the limit of the container (--memory) or of the unit (MemoryMax=)."
    return Finding(subject="memory", found=found, remedy=remedy)


def _adapters(facts: DeviceFacts) -> Iterator[Finding]:
    """Each graphics adapter, and why there is none. A device without one is sound."""
    for each in facts.adapters:
        words = [each.kind, each.driver, each.api, format_size(each.memory_bytes)]
        if each.free_bytes is not None:
            words[-1] += f" ({format_size(each.free_bytes)} free)"
        words += ["float16"] * each.has_float16
        found = f"{', '.join(words)}; {_use(each, facts)}"
        yield Finding(subject=f"{_ADAPTER} {each.name}", found=found)
    has_others = facts.num_cuda_devices and not any(map(_is_nvidia, facts.adapters))
    if has_others:
        use = _use_by_cuda(facts)
        yield Finding(subject="GPUs", found=f"{facts.num_cuda_devices} of NVIDIA by CUDA; {use}")
    if facts.no_adapter is not None and (facts.no_adapter.is_fault or not has_others):
        why = facts.no_adapter
        yield Finding(
            subject=f"{_ADAPTER}s",
            found=why.cause if why.is_fault else f"{why.cause}: {why.remedy}",
            remedy=f"{why.remedy[0].upper()}{why.remedy[1:]}." if why.is_fault else None,
        )


def _use(adapter: GpuAdapter, facts: DeviceFacts) -> str:
    if adapter.kind == "software":
        return "not used unless --allow-software-adapter"
    if _is_nvidia(adapter) and facts.num_cuda_devices:
        return _use_by_cuda(facts)
    if facts.has_webgpu:
        return "back end webgpu"
    return 'not used: pip install "edge-inference[webgpu]"'


def _use_by_cuda(facts: DeviceFacts) -> str:
    return "back end triton" if facts.has_triton else 'not used: pip install "edge-inference[gpu]"'


def _is_nvidia(adapter: GpuAdapter) -> bool:
    return adapter.vendor == "NVIDIA"


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
            remedy="Put the files named in order, or move their folder away and run edge pair.",
        )
    found = f"paired with {len(facts.met)} by edge pair" if facts.met else "with no other device"
    is_alone = not (facts.has_token or facts.met or finds_peers)
    return Finding(
        subject="pairing",
        found="a member by a token file" if facts.has_token else found,
        remedy="Run edge pair here and on another device." if is_alone else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedLink:
    """A link between two devices."""

    ends: str
    """The other end, such as "to attic"."""
    interface: Interface | None
    """This device's interface; None: this device is not an end."""
    times: LinkTimes | EdgeError
    """The measurement, or why it failed."""
    unused: tuple[Interface, ...] = ()
    """Further interfaces of this device in a network with the other end."""


def link_finding(facts: DiagnosedLink) -> Finding:
    """The link's measurement, and a remedy if its class of interface should do better."""
    subject = f"link {facts.ends}"
    if isinstance(facts.times, EdgeError):
        return Finding(
            subject=subject,
            found=str(facts.times),
            remedy="Devices of a plan connect to each other: open the daemon's port in the "
            "firewall there (edge peer --listen 0.0.0.0:5000 sets the port).",
        )
    times, interface = facts.times, facts.interface
    rate = 8 * min(times.there_bytes_per_s, times.back_bytes_per_s)
    found = f"{_bits(rate)}, {1e3 * times.latency_s:.2g} ms"
    if interface is not None:
        found += f", by {_in_words(interface)}"
    if facts.unused:
        found += f", and not by {', '.join(map(_in_words, facts.unused))}"
    return Finding(subject=subject, found=found, remedy=_link_remedy(times, rate, interface))


def _in_words(interface: Interface) -> str:
    of_class = f" of {_bits(interface.bits_per_s)}" if interface.bits_per_s else ""
    return f"{interface.name} ({interface.kind}{of_class})"


def _link_remedy(times: LinkTimes, rate: float, interface: Interface | None) -> str | None:
    kind = None if interface is None else interface.kind
    if kind == "Wi-Fi":
        if times.is_unsteady or rate < _SLOW_WIFI_BITS_PER_S or times.latency_s > _LONG_LATENCY_S:
            return (
                "Connect the devices by a cable; or move them nearer to the access point, and use "
                "its band of 5 or 6 GHz. Every token waits for this link."
            )
        return None
    if times.is_unsteady:
        return "Packets are lost or delayed: try another cable and another port of the switch."
    is_fast_ethernet = _FAST_ETHERNET[0] <= rate <= _FAST_ETHERNET[1]
    if interface is None:
        return _SLOW_PART if is_fast_ethernet else None
    if interface.bits_per_s is None:
        return None
    if interface.is_half_duplex:
        return (
            f"{interface.name} runs in half duplex: turn on autonegotiation at both ends of its "
            "cable."
        )
    if interface.bits_per_s <= 100e6:
        return (
            f"{interface.name} does 100 Mbit/s only: take a cable of category 5e or better and a "
            "port of the switch that does 1 Gbit/s."
        )
    if rate >= _LEAST_OF_CLASS * interface.bits_per_s:
        if times.latency_s <= _LONG_LATENCY_S:
            return None
        return "Something on the path delays packets: Wi-Fi at the other end, or a router."
    if is_fast_ethernet:
        return _SLOW_PART
    return (
        "Something on the path is slower than this interface: the other device's, Wi-Fi, a "
        "switch; or the network was busy. Run edge doctor there, too."
    )


def _bits(rate: float) -> str:
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def peers_together(facts: DeviceFacts, peers: Sequence[PeerInfo]) -> Iterator[Finding]:
    """Findings about this device as others see it, and about paired devices."""
    here = [peer.name for peer in peers if peer.host == facts.host]
    yield Finding(
        subject="this device as a peer",
        found=f"others find it as {', '.join(here)}"
        if here
        else "no daemon of it was found; edge peer starts one",
    )
    answering = {peer.device_id for peer in peers}
    missing = sorted(name for id, name in facts.met.items() if id not in answering)
    if facts.met:
        found = f"{len(facts.met) - len(missing)} of {len(facts.met)} answer as peers"
        found += f"; not {', '.join(missing)}" if missing else ""
        yield Finding(subject="paired devices", found=found)
    yield from _offers(facts, peers)
    yield from _clocks(facts, peers)
    yield from _speeds(peers)


def _offers(facts: DeviceFacts, peers: Sequence[PeerInfo]) -> Iterator[Finding]:
    """A finding if the daemons of this machine offer more of its memory than is free: each offers
    all that is free, or what it was given."""
    here = [peer for peer in peers if peer.host == facts.host and peer.host_memory_bytes is None]
    offered_bytes = sum(peer.free_now_bytes for peer in here)
    if offered_bytes > _MOST_OFFERED * facts.machine_free_bytes:
        yield Finding(
            subject="memory offered",
            found=f"{format_size(offered_bytes)} by {', '.join(peer.name for peer in here)}, but "
            f"{format_size(facts.machine_free_bytes)} are free",
            remedy="End other programs, or give each of these daemons less: edge memory, or edge "
            "peer --memory.",
        )


def _clocks(facts: DeviceFacts, peers: Sequence[PeerInfo]) -> Iterator[Finding]:
    """Findings about the clocks of other devices; correct ones share a line."""
    ahead = {
        peer.name: peer.clock_ahead_s
        for peer in peers
        if peer.host != facts.host and peer.clock_ahead_s is not None
    }
    wrong = {name: ahead_s for name, ahead_s in ahead.items() if abs(ahead_s) > _MOST_CLOCK_S}
    if len(wrong) < len(ahead):
        most_s = max(abs(ahead_s) for name, ahead_s in ahead.items() if name not in wrong)
        names = ", ".join(name for name in ahead if name not in wrong)
        yield Finding(subject="clocks", found=f"as here on {names}, within {most_s:.2g} s")
    for name, ahead_s in wrong.items():
        yield Finding(
            subject=f"clock of {name}",
            found=f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this device's",
            remedy="Set both clocks by the network (timedatectl set-ntp true): until then the "
            "times in their logs cannot be compared. Edge itself does not need it.",
        )


def _speeds(peers: Sequence[PeerInfo]) -> Iterator[Finding]:
    """Findings about the peers' latest steps, measured against predicted."""
    compared = [(peer, peer.slower) for peer in peers if peer.slower is not None]
    if not compared:
        yield Finding(
            subject="speed against prediction",
            found="no answer was computed in the last minute; edge run --explain compares one",
        )
    for peer, slower in compared:
        yield Finding(
            subject=f"speed of {peer.name}",
            found=f"a token takes it {slower:.1f} times as long as predicted",
            remedy="End other work on it, or let it cool down; if it stays slow, edge plan "
            "--measure finds the plan for its present speed."
            if peer.is_slow
            else None,
        )


def peer_findings(
    peers: Sequence[PeerInfo], failure: str | None, left_out: Sequence[EdgeError]
) -> Iterator[Finding]:
    """Findings about the peers, and about announced ones that cannot be used.

    failure: the error of the search; None: it found some. left_out: the errors of announced peers.
    """
    if failure is not None:
        yield Finding(
            subject="peers",
            found=failure,
            remedy="Run edge doctor on those devices, too; edge peer and edge pair start there.",
        )
    for error in left_out:
        yield Finding(
            subject="an announced peer",
            found=str(error),
            remedy="Install the same version of Edge on both devices."
            if isinstance(error, ProtocolError)
            else "Open the daemon's port in the firewall there (edge peer --listen 0.0.0.0:5000 "
            "sets the port), or restart the daemon; run edge doctor there, too.",
        )
    for peer in peers:
        remedy = None
        if peer.free_now_bytes <= 0:
            remedy = "End a model that it runs, or give it more by edge memory."
        yield Finding(
            subject=f"peer {peer.name}",
            found=f"Edge {peer.software}, {peer.backend}, {peer.threads} threads, "
            f"{format_size(peer.free_now_bytes)} of {format_size(peer.memory_bytes)} free",
            remedy=remedy,
        )


def fit_for_strangers(finding: Finding, addresses: Sequence[str], home: str) -> Finding:
    """The finding without network addresses (given ones included) and without the home folder."""
    if finding.subject.startswith(_ADAPTER):
        return finding  # versions of drivers look like addresses
    found = finding.found
    for address in addresses:
        found = found.replace(address, "ADDRESS").replace(address.rpartition(":")[0], "ADDRESS")
    found = _ADDRESS.sub("ADDRESS", found.replace(home, "~"))
    return replace(finding, found=found)
