"""`edge doctor`: checks of this device and its peers, with remedies."""

from __future__ import annotations

import ipaddress
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from itertools import combinations

import click
import psutil

from edge.cli.diagnosis import (
    DeviceFacts,
    DiagnosedLink,
    Finding,
    device_findings,
    fit_for_strangers,
    link_finding,
    peer_findings,
    peers_together,
)
from edge.cli.field_options import given_options
from edge.cli.options import ClusterOptions, open_cluster
from edge.cli.records import print_json
from edge.errors import EdgeError, RequestError
from edge.host.addresses import interface_addresses
from edge.host.cache_paths import cache_root
from edge.host.cgroup import processors
from edge.host.cuda_driver import num_cuda_devices
from edge.host.free_memory import free_memory_bytes
from edge.host.gpu_adapters import gpu_adapters, has_webgpu_package, no_adapter
from edge.host.home import home_or_none
from edge.host.identity import host_id
from edge.host.interfaces import interface_to, interfaces_beside
from edge.host.probes import existing, listen_failure, multicast_failure, write_failure
from edge.membership.store import TOKEN_VARIABLE, MembershipStore, config_root
from edge.planning.profile_cache import FactsCache
from edge.profiling.coordinator_links import coordinator_links
from edge.protocol.peer_info import PeerInfo
from edge.system.processes import allowed_cores
from edge.system.processor import instructions, processor_names
from edge.system.signals import run_in_loop
from edge.transport import TransportError, interface_states, parse_address
from edge.version import __version__

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


@click.command("doctor", short_help="Check this device and its peers; suggest remedies.")
@given_options("wanted", ClusterOptions, only=("addresses", "cluster", "interfaces", "insecure"))
@click.option(
    "--listen",
    default=":0",
    show_default=True,
    metavar="HOST:PORT",
    help="Check that a daemon can listen here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON to attach to a report.")
def command(wanted: ClusterOptions, listen: str, as_json: bool) -> None:
    """Check this device and the peers that it finds, and suggest remedies.

    It takes some seconds. The exit code is 0 if nothing is wrong, else 1. The JSON has no keys and
    no addresses in it.

    \b
    Examples:
      edge doctor
      edge doctor --peer 192.168.1.7:5000       a peer that zeroconf does not reach
      edge doctor --listen 0.0.0.0:5000         can a daemon listen there?
      edge doctor --json > report.json          to attach to an issue
    """
    facts = _device_facts(listen)
    peers: tuple[PeerInfo, ...] = ()
    links: list[DiagnosedLink] = []
    left_out: tuple[EdgeError, ...] = ()
    failure = None
    if (
        wanted.insecure or facts.membership_failure is None
    ):  # else there are no keys for the connection
        try:
            with open_cluster(wanted) as found:
                peers, left_out = found.peers, found.left_out
            links = _links([peer for peer in peers if peer.host != facts.host])
            links += remembered_links(peers)
        except EdgeError as error:
            failure = str(error)
    findings = [
        *device_findings(facts, finds_peers=bool(peers)),
        *peer_findings(peers, failure, left_out),
        *map(link_finding, links),
        *peers_together(facts, peers),
    ]
    if as_json:
        home = str(home_or_none() or "~")
        report = [asdict(fit_for_strangers(each, wanted.addresses, home)) for each in findings]
        print_json(report)
    else:
        for each in findings:
            click.echo(_line(each))
    if any(each.remedy is not None for each in findings):
        sys.exit(1)


def _line(finding: Finding) -> str:
    if finding.remedy is None:
        return f"ok     {finding.subject}: {finding.found}"
    return f"WRONG  {finding.subject}: {finding.found}\n       {finding.remedy}"


def _device_facts(listen: str) -> DeviceFacts:
    try:
        host, port = parse_address(listen)
    except (TransportError, ValueError) as error:
        raise RequestError(f"--listen: {error}", remedy="write HOST:PORT") from error
    membership, membership_failure = None, None
    try:
        membership = MembershipStore(config_root()).membership()
    except EdgeError as error:
        membership_failure = str(error)
    folder = cache_root()
    packages = {name: version(name) for name in ("numpy", "onnxruntime", "zeroconf")}
    return DeviceFacts(
        versions={"Edge": __version__, "Python": platform.python_version(), **packages},
        is_x86=platform.machine() in ("x86_64", "AMD64"),
        instructions=tuple(each for each in _INSTRUCTIONS if each in instructions()),
        processor=next((each for each in processor_names() if each.startswith("model name")), ""),
        is_virtual="hypervisor" in instructions(),
        cores=len(allowed_cores()),
        quota_cores=processors(),
        free_memory_bytes=free_memory_bytes(),
        machine_free_bytes=int(psutil.virtual_memory().available),
        adapters=gpu_adapters(allow_software=True),
        no_adapter=None if gpu_adapters() else no_adapter(),
        num_cuda_devices=num_cuda_devices(),
        has_triton=all(map(find_spec, ("torch", "triton"))),
        has_webgpu=has_webgpu_package(),
        cache_folder=str(folder).replace(str(home_or_none() or "~"), "~", 1),
        cache_failure=write_failure(folder),
        free_disk_bytes=psutil.disk_usage(str(existing(folder))).free,
        listen=listen,
        listen_failure=listen_failure(host, port),
        multicast=_multicast(),
        has_token=bool(os.environ.get(TOKEN_VARIABLE)),
        membership_failure=membership_failure,
        met={} if membership is None else dict(membership.others),
        host=host_id(),
    )


def _links(peers: Sequence[PeerInfo]) -> list[DiagnosedLink]:
    """The links to peers on other machines, measured now."""
    found = []
    measured = run_in_loop(coordinator_links(peers)) if peers else {}
    for peer in peers:
        interface = interface_to(parse_address(peer.address)[0])
        found.append(
            DiagnosedLink(
                ends=f"to {peer.name}",
                interface=interface,
                times=measured[peer.id],
                unused=tuple(e for e in interfaces_beside(peer.addresses) if e != interface),
            )
        )
    return found


def remembered_links(peers: Sequence[PeerInfo]) -> Iterator[DiagnosedLink]:
    """The links between peers on two machines, as measured for a plan in the last day."""
    known = FactsCache(cache_root() / "measured")
    for one, other in combinations(peers, 2):
        times = known.link(one, other) or known.link(other, one)
        if times is not None and one.host != other.host:
            ends = f"between {one.name} and {other.name}, as a plan has it"
            yield DiagnosedLink(ends=ends, interface=None, times=times)


def _multicast() -> dict[str, str | None]:
    up = {name for name, state in interface_states().items() if state.is_up}
    first = {
        name: min(addresses, key=lambda each: ":" in each)
        for name, addresses in interface_addresses().items()
        if name in up and addresses
    }
    return {
        name: multicast_failure(name, address)
        for name, address in first.items()
        if not ipaddress.ip_address(address).is_loopback
    }
