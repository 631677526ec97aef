"""What `edge doctor` makes of facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.cli.commands.doctor import remembered_links
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
from edge.errors import NetworkError, ProtocolError
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.gpu_adapters import GpuAdapter, NoAdapter
from edge.host.interfaces import Interface
from edge.planning.profile_cache import FactsCache
from edge.protocol.measurements import LinkGlance, LinkTimes, Span
from edge.protocol.peer_info import PeerInfo
from tests.support.peer_infos import hosted_model, peer_info

CARD = GpuAdapter(
    name="AMD Radeon RX 7600 (RADV NAVI33)",
    kind="discrete",
    vendor="AMD",
    driver="radv Mesa 25.0.7",
    api="Vulkan",
    memory_bytes=8 << 30,
    free_bytes=7 << 30,
    largest_buffer_bytes=(4 << 30) - 1,
    has_float16=True,
)

NO_ADAPTER = NoAdapter(cause="no driver", remedy="install one", is_fault=False)

SOUND = DeviceFacts(
    versions={"Edge": "1", "Python": "3.11"},
    is_x86=True,
    instructions=("avx2",),
    processor="model name\t: AMD EPYC 7B13 64-Core Processor",
    is_virtual=True,
    cores=8,
    quota_cores=None,
    free_memory_bytes=8 << 30,
    machine_free_bytes=8 << 30,
    adapters=(CARD,),
    no_adapter=None,
    num_cuda_devices=0,
    has_triton=True,
    has_webgpu=True,
    cache_folder="~/.cache/edge",
    cache_failure=None,
    free_disk_bytes=50 << 30,
    listen="0.0.0.0:5000",
    listen_failure=None,
    multicast={"eth0": None},
    has_token=False,
    membership_failure=None,
    met={"1" * 32: "attic"},
    host="h",
)


def test_nothing_is_wrong_with_a_sound_device() -> None:
    assert [
        each for each in device_findings(SOUND, finds_peers=False) if each.remedy is not None
    ] == []


@pytest.mark.parametrize(
    ("changed", "subject", "remedy"),
    [
        ({"instructions": ("sse",)}, "instructions", "CPU type host"),
        ({"processor": "AMD EPYC 9B14 96-Core"}, "instructions", "CPU type host"),
        ({"processor": "Intel(R) Xeon(R) Gold 6342 CPU"}, "instructions", "CPU type host"),
        (
            {"free_memory_bytes": 1 << 20, "machine_free_bytes": 1 << 20},
            "memory",
            "End programs",
        ),
        ({"free_memory_bytes": 1 << 20}, "memory", "Raise the limit of the container"),
        (
            {"adapters": (), "no_adapter": replace(NO_ADAPTER, is_fault=True)},
            "graphics adapters",
            "Install one.",
        ),
        ({"free_disk_bytes": 1 << 20}, "cache", "Free some"),
        ({"cache_failure": "Read-only file system"}, "cache", "EDGE_CACHE"),
        ({"listen_failure": "Address already in use"}, "listening", "another port"),
        ({"multicast": {}}, "network", "Connect this device"),
        ({"multicast": {"eth0": None, "wlan0": "nothing"}}, "multicast on wlan0", "--peer"),
        ({"met": {}}, "pairing", "edge pair"),
        ({"membership_failure": "damaged"}, "pairing", "move their folder away"),
    ],
)
def test_each_fault_is_found_alone_and_has_its_remedy(
    changed: dict[str, Any], subject: str, remedy: str
) -> None:
    findings = device_findings(replace(SOUND, **changed), finds_peers=False)
    (wrong,) = [each for each in findings if each.remedy is not None]
    assert wrong.subject == subject
    assert wrong.remedy is not None
    assert remedy in wrong.remedy


@pytest.mark.parametrize(("has_token", "finds_peers"), [(True, False), (False, True)])
def test_a_token_or_a_peer_that_answers_is_as_good_as_pairing(
    has_token: bool, finds_peers: bool
) -> None:
    facts = replace(SOUND, met={}, has_token=has_token)
    assert all(each.remedy is None for each in device_findings(facts, finds_peers=finds_peers))


def test_peers_without_memory_or_of_another_version_are_wrong() -> None:
    peers = [peer_info("sound"), peer_info("full", free_bytes=0)]
    old = ProtocolError("peer old runs Edge 0, this device runs Edge 1")
    shut = NetworkError("cannot connect to 192.168.1.7:5000: timed out")
    told = [(each.subject, each.remedy) for each in peer_findings(peers, None, [old, shut])]
    assert [subject for subject, _ in told] == [
        *["an announced peer"] * 2,
        *["peer sound", "peer full"],
    ]
    assert "same version" in (told[0][1] or "")
    assert "firewall" in (told[1][1] or "")
    assert told[2][1] is None
    assert "edge memory" in (told[3][1] or "")


def found_in(**changed: Any) -> dict[str, str]:
    findings = device_findings(replace(SOUND, **changed), finds_peers=True)
    return {each.subject: each.found for each in findings if each.remedy is None}


def test_what_computes_is_named_as_people_know_it() -> None:
    assert found_in()["instructions"] == "ONNX Runtime computes with AVX2 (avx2)"
    vnni = ("avx2", "avx512f", "avx512_vnni")
    assert "with AVX-512 VNNI (" in found_in(instructions=vnni)["instructions"]
    assert "with AMX (" in found_in(instructions=(*vnni, "amx_int8"))["instructions"]
    arm = {"is_x86": False, "processor": ""}
    assert "NEON with dot products" in found_in(instructions=("asimddp",), **arm)["instructions"]
    assert found_in(instructions=(), **arm)["instructions"] == "not known"
    bare = {"instructions": ("sse",), "is_virtual": False}
    assert found_in(**bare)["instructions"] == "not known (sse)", "nothing can help it"


def test_the_control_group_is_named_where_it_limits() -> None:
    told = found_in(free_memory_bytes=4 << 30)["memory"]
    assert told == "4.0 GiB free; the control group leaves no more of the machine's 8.0 GiB"
    assert found_in(quota_cores=8.0)["cores"] == "8"
    assert "leaves the time of 2.5 (" in found_in(quota_cores=2.5)["cores"]


def test_each_graphics_adapter_is_named_with_what_uses_it() -> None:
    subject = f"graphics adapter {CARD.name}"
    card = "discrete, radv Mesa 25.0.7, Vulkan, 8.0 GiB (7.0 GiB free), float16"
    assert found_in()[subject] == f"{card}; back end webgpu"
    told = found_in(has_webgpu=False)[subject]
    assert told == f'{card}; not used: pip install "edge-inference[webgpu]"'
    bare = replace(CARD, free_bytes=None, has_float16=False)
    assert "Vulkan, 8.0 GiB; back" in found_in(adapters=(bare,))[subject]
    assert "graphics adapters" not in found_in()


def test_an_adapter_of_nvidia_is_used_by_cuda_where_its_driver_is() -> None:
    nvidia = {"adapters": (replace(CARD, name="RTX", vendor="NVIDIA"),)}
    assert found_in(**nvidia)["graphics adapter RTX"].endswith("; back end webgpu")
    cuda = {"num_cuda_devices": 2}
    assert found_in(**nvidia, **cuda)["graphics adapter RTX"].endswith("; back end triton")
    told = found_in(**nvidia, **cuda, has_triton=False)["graphics adapter RTX"]
    assert told.endswith('; not used: pip install "edge-inference[gpu]"')
    none = {"adapters": (), "no_adapter": NO_ADAPTER}
    without_vulkan = found_in(**none, **cuda)
    assert without_vulkan["GPUs"] == "2 of NVIDIA by CUDA; back end triton"
    assert "graphics adapters" not in without_vulkan


def test_adapters_in_software_are_not_used() -> None:
    software = replace(CARD, name="SwiftShader", kind="software")
    told = found_in(adapters=(software,), no_adapter=NO_ADAPTER)
    adapter = told["graphics adapter SwiftShader"]
    assert adapter.endswith("; not used unless --allow-software-adapter")
    assert told["graphics adapters"] == "no driver: install one"


WIRED = Interface(name="eth0", kind="Ethernet", bits_per_s=10**9)
WIRELESS = Interface(name="wlan0", kind="Wi-Fi", bits_per_s=None)
SPAN = Span(low_s=1e-3, middle_s=1e-3, high_s=1e-3)


def link(interface: Interface | None, mbits: float, **changed: Any) -> Finding:
    values: dict[str, Any] = {
        "latency_s": 2e-4,
        "there_bytes_per_s": 125e6,
        "back_bytes_per_s": mbits * 125e3,
        "glance": LinkGlance(echo_s=SPAN, there_s=SPAN, back_s=SPAN),
        **changed,
    }
    return link_finding(
        DiagnosedLink(ends="to attic", interface=interface, times=LinkTimes(**values))
    )


def test_a_link_as_fast_as_its_class_is_well() -> None:
    found = link(WIRED, 930)
    assert found.remedy is None
    assert found.subject == "link to attic"
    assert found.found == "930 Mbit/s, 0.2 ms, by eth0 (Ethernet of 1 Gbit/s)"
    assert link(WIRELESS, 400).remedy is None
    assert link(None, 5).remedy is None, "nobody knows what it should do"
    assert "category 5e" in (link(None, 94).remedy or ""), "but this number is known"
    assert link(replace(WIRED, kind="virtual", bits_per_s=None), 5).remedy is None


@pytest.mark.parametrize(
    ("finding", "remedy"),
    [
        (link(WIRED, 94), "category 5e"),
        (link(WIRED, 300), "Run edge doctor there"),
        (link(WIRED, 900, latency_s=0.01), "delays packets"),
        (link(WIRED, 900, is_unsteady=True), "another cable"),
        (link(replace(WIRED, bits_per_s=10**8), 94), "does 100 Mbit/s only"),
        (link(replace(WIRED, is_half_duplex=True), 500), "half duplex"),
        (link(WIRELESS, 20), "by a cable"),
        (link(WIRELESS, 400, latency_s=0.02), "by a cable"),
        (link(WIRELESS, 400, is_unsteady=True), "access point"),
    ],
)
def test_a_link_below_its_class_has_its_remedy(finding: Finding, remedy: str) -> None:
    assert finding.remedy is not None
    assert remedy in finding.remedy


def test_links_between_others_are_those_of_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    attic = peer_info("attic", host="1", address="10.0.0.1:5")
    desk = peer_info("desk", host="2", address="10.0.0.2:5")
    beside = peer_info("beside", host="2", address="10.0.0.2:6")
    span = LinkGlance(echo_s=SPAN, there_s=SPAN, back_s=SPAN)
    slow = LinkTimes(latency_s=3e-4, there_bytes_per_s=94e6 / 8, back_bytes_per_s=1e9, glance=span)
    known = FactsCache(tmp_path / "measured")
    known.keep_link(attic, desk, slow)
    known.keep_link(desk, beside, slow)
    (found,) = remembered_links([desk, attic, beside])
    finding = link_finding(found)
    assert finding.subject == "link between desk and attic, as a plan has it"
    assert finding.found == "94 Mbit/s, 0.3 ms"
    assert "category 5e" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("free_gib", "finding"),
    [
        ([5], None),
        ([5, 5], "10.0 GiB by a, b, but 8.0 GiB are free"),
        ([10], "10.0 GiB by a, but 8.0 GiB are free"),
    ],
)
def test_more_memory_may_be_offered_than_is_free(free_gib: list[int], finding: str | None) -> None:
    peers = [
        peer_info(name, free_bytes=gib << 30, host="h")
        for name, gib in zip("abc", free_gib, strict=False)
    ]
    others = [
        peer_info("far", free_bytes=99 << 30, host="far"),
        peer_info("gpu", free_bytes=99 << 30, host="h", host_memory_bytes=0),
    ]
    told = {each.subject: each for each in peers_together(SOUND, [*peers, *others])}
    found = told.get("memory offered")
    assert (found and found.found) == finding
    assert found is None or "edge memory" in (found.remedy or "")


def test_a_link_names_the_interfaces_that_lead_there_too_and_are_not_used() -> None:
    measured = DiagnosedLink(
        ends="to attic",
        interface=WIRELESS,
        times=LinkTimes(
            there_bytes_per_s=50e6,
            back_bytes_per_s=50e6,
            latency_s=1e-3,
            is_unsteady=False,
            glance=LinkGlance(echo_s=SPAN, there_s=SPAN, back_s=SPAN),
        ),
        unused=(WIRED,),
    )
    assert link_finding(measured).found.endswith(
        "by wlan0 (Wi-Fi), and not by eth0 (Ethernet of 1 Gbit/s)"
    )


def test_a_link_that_cannot_be_made_names_the_firewall() -> None:
    failed = NetworkError("cannot connect to 192.168.1.7:5000: timed out")
    finding = link_finding(DiagnosedLink(ends="to attic", interface=WIRED, times=failed))
    assert "firewall" in (finding.remedy or "")
    assert "192.168" not in fit_for_strangers(finding, [], "/home/me").found


def test_who_knows_whom() -> None:
    met = {"1" * 32: "attic", "2" * 32: "desk"}
    peers = [
        peer_info("attic", device_id="1" * 32, host="far"),
        peer_info("vm-2", device_id="3" * 32, host="h", free_bytes=1 << 30),
    ]
    told = {each.subject: each for each in peers_together(replace(SOUND, met=met), peers)}
    assert told["this device as a peer"].found == "others find it as vm-2"
    assert told["paired devices"].found == "1 of 2 answer as peers; not desk"
    assert all(each.remedy is None for each in told.values()), "a device may be off"
    alone = {each.subject: each.found for each in peers_together(replace(SOUND, met={}), [])}
    assert "edge peer starts one" in alone["this device as a peer"]
    assert "paired devices" not in alone
    assert "edge run --explain compares one" in alone["speed against prediction"]


def test_whose_clock_is_wrong() -> None:
    def told(**ahead: float | None) -> dict[str, Finding]:
        peers = [peer_info(name, host=name, clock_ahead_s=each) for name, each in ahead.items()]
        here = peer_info("here", host=SOUND.host, clock_ahead_s=99.0)
        return {each.subject: each for each in peers_together(SOUND, [*peers, here])}

    found = told(attic=0.0123, desk=-1.5, barn=90.4, shed=-86400.0, mute=None)
    assert found["clocks"].found == "as here on attic, desk, within 1.5 s"
    assert found["clocks"].remedy is None
    assert found["clock of barn"].found == "90 s ahead of this device's"
    assert "timedatectl" in (found["clock of barn"].remedy or "")
    assert found["clock of shed"].found == "86,400 s behind this device's"
    assert "clock of here" not in found, "it is the same one"
    assert "clocks" not in told(barn=90.4)
    assert not any("clock" in each for each in told(mute=None))


def test_who_is_slower_than_predicted() -> None:
    def computing(name: str, slower: float) -> PeerInfo:
        return peer_info(name, models=(hosted_model(slower=slower),))

    peers = [computing("attic", 2.14), computing("desk", 1.04), peer_info("idle")]
    told = {each.subject: each for each in peers_together(SOUND, peers)}
    assert told["speed of attic"].found == "a token takes it 2.1 times as long as predicted"
    assert "edge plan --measure" in (told["speed of attic"].remedy or "")
    assert told["speed of desk"].remedy is None
    assert "speed of idle" not in told
    assert "speed against prediction" not in told


def test_no_peers_is_wrong_and_says_why() -> None:
    (finding,) = peer_findings([], "no peers found", [])
    assert finding.found == "no peers found"
    assert finding.remedy is not None


def test_a_report_has_no_addresses_and_no_home() -> None:
    found = "attic.lan:50 and 192.168.1.7:5000, [fe80::1:2]:50, ::1; /home/me/x; Edge 0.1.0, 3.11.7"
    finding = Finding(subject="peers", found=found)
    shown = fit_for_strangers(finding, ["attic.lan:50"], "/home/me").found
    assert shown == "ADDRESS and ADDRESS, ADDRESS, ADDRESS; ~/x; Edge 0.1.0, 3.11.7"
    driver = Finding(subject="graphics adapter Arc", found="Intel 32.0.101.595")
    assert fit_for_strangers(driver, [], "/home/me") == driver, "a version is no address"
