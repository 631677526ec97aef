"""What `edge doctor` makes of facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge.cli.diagnosis import (
    DeviceFacts,
    Finding,
    device_findings,
    fit_for_strangers,
    peer_findings,
)
from tests.support.peer_infos import peer_info

SOUND = DeviceFacts(
    versions={"Edge": "1", "Python": "3.11"},
    instructions=("avx2",),
    free_memory_bytes=8 << 30,
    cache_folder="~/.cache/edge",
    cache_failure=None,
    free_disk_bytes=50 << 30,
    listen="0.0.0.0:5000",
    listen_failure=None,
    multicast={"eth0": None},
    has_token=False,
    membership_failure=None,
    num_met=1,
)


def test_nothing_is_wrong_with_a_sound_device() -> None:
    assert [
        each for each in device_findings(SOUND, finds_peers=False) if each.remedy is not None
    ] == []


@pytest.mark.parametrize(
    ("changed", "subject", "remedy"),
    [
        ({"free_memory_bytes": 1 << 20}, "memory", "End programs"),
        ({"free_disk_bytes": 1 << 20}, "cache", "Free some"),
        ({"cache_failure": "Read-only file system"}, "cache", "EDGE_CACHE"),
        ({"listen_failure": "Address already in use"}, "listening", "another port"),
        ({"multicast": {}}, "network", "Connect this device"),
        ({"multicast": {"eth0": None, "wlan0": "nothing"}}, "multicast on wlan0", "--peer"),
        ({"num_met": 0}, "pairing", "edge pair"),
        ({"membership_failure": "damaged"}, "pairing", "anew"),
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
    facts = replace(SOUND, num_met=0, has_token=has_token)
    assert all(each.remedy is None for each in device_findings(facts, finds_peers=finds_peers))


def test_peers_of_another_version_or_without_memory_are_wrong() -> None:
    peers = [
        peer_info("sound", software="1"),
        peer_info("old", software="0"),
        peer_info("full", software="1", free_bytes=0),
    ]
    findings = peer_findings(peers, None, software="1")
    assert [(each.subject, each.remedy is None) for each in findings] == [
        ("peer sound", True),
        ("peer old", False),
        ("peer full", False),
    ]


def test_no_peers_is_wrong_and_says_why() -> None:
    (finding,) = peer_findings([], "no peers found", software="1")
    assert finding.found == "no peers found"
    assert finding.remedy is not None


def test_a_report_has_no_addresses_and_no_home() -> None:
    found = "attic.lan:50 and 192.168.1.7:5000, [fe80::1:2]:50, ::1; /home/me/x; Edge 0.1.0, 3.11.7"
    finding = Finding(subject="peers", found=found)
    shown = fit_for_strangers(finding, ["attic.lan:50"], "/home/me").found
    assert shown == "ADDRESS and ADDRESS, ADDRESS, ADDRESS; ~/x; Edge 0.1.0, 3.11.7"
