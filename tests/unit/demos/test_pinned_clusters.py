"""Cases of pinned peers, the wire between them, and what of predictions is kept."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.demos.bench.clusters.networks import Network
from edge.demos.bench.clusters.table import CASES, CORES, GIB, MBIT, Device
from edge.demos.bench.clusters.wire import Port, arrival_s
from edge.demos.bench.predictions import LOCAL_CLUSTER, PREDICTIONS, Row, summary, table
from edge.demos.control_groups import ControlGroup
from edge.demos.shapes import SHAPES

ROW = Row(
    date="2026-01-01",
    commit="-",
    cluster="2 local",
    shape="M",
    asked="auto",
    plan="a: layers 0-11",
    said_tokens_per_s=105.0,
    tokens_per_s_p20=90.0,
    tokens_per_s=100.0,
    tokens_per_s_p80=101.0,
    said_over_was=1.05,
    said_first_token_s=0.1,
    first_token_s=0.1,
    times_solo=1.0,
    hardware="-",
    versions="-",
)


def test_every_case_fits_the_machine() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.shape in SHAPES
        assert len({device.name for device in case.devices}) == len(case.devices)
        for core in range(CORES):
            assert sum(each.quota for each in case.devices if each.core == core) <= 1
        assert all(each.core < CORES for each in case.devices)


def test_a_quota_is_for_whole_layers_only() -> None:
    """Between two sums lies less than a period of it."""
    for case in CASES:
        if any(device.quota < 1 for device in case.devices):
            assert "tensor" not in case.asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quota": 0.01}, "give it 0.05 to 1"),
        ({"quota": 1.5}, "give it 0.05 to 1"),
        ({"core": -1}, "is on core -1"),
        ({"bytes_per_s": 0.0}, "rate of x"),
        ({"delay_s": -1.0}, "delay of x"),
    ],
)
def test_devices_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device(**{"name": "x", "core": 0, **options})


def test_a_device_says_what_it_is() -> None:
    device = Device(name="a", core=1, quota=0.5, bytes_per_s=100 * MBIT, delay_s=0.0005)
    assert device.words == "a core 1 x 0.5 4 GiB 100 Mbit/s 0.5 ms"
    assert Device(name="b", core=0, memory_bytes=GIB // 2).words == "b core 0 0.5 GiB"


class TestWire:
    """Seconds are small whole numbers here."""

    def test_a_packet_takes_its_bytes_and_its_way(self) -> None:
        source = Port(bytes_per_s=10, delay_s=1)
        target = Port(bytes_per_s=100, delay_s=2)
        assert arrival_s(source, target, 20, now_s=5) == 5 + 2 + 3

    def test_the_slower_end_decides(self) -> None:
        fast, slow = Port(bytes_per_s=float("inf"), delay_s=0), Port(bytes_per_s=10, delay_s=0)
        slow.receives_until_s = 1.0
        assert arrival_s(fast, slow, 20, now_s=1) == 3

    def test_a_slow_end_that_was_idle_takes_its_time(self) -> None:
        fast, slow = Port(bytes_per_s=float("inf"), delay_s=1), Port(bytes_per_s=10, delay_s=0)
        assert arrival_s(fast, slow, 20, now_s=100) == 100 + 1 + 2
        assert arrival_s(fast, slow, 20, now_s=100) == 100 + 1 + 4

    def test_packets_queue_where_they_leave_and_where_they_arrive(self) -> None:
        a, b, c = (Port(bytes_per_s=10, delay_s=1) for _ in range(3))
        assert arrival_s(a, c, 10, now_s=0) == 3
        assert arrival_s(a, b, 10, now_s=0) == 4  # a was busy for 1 s
        assert arrival_s(b, c, 10, now_s=0) == 4  # c was busy until 3

    def test_both_ways_at_once_do_not_meet(self) -> None:
        a, b = (Port(bytes_per_s=10, delay_s=1) for _ in range(2))
        assert arrival_s(a, b, 10, now_s=0) == arrival_s(b, a, 10, now_s=0) == 3


def test_no_two_beds_share_names_or_addresses() -> None:
    here, there = Network(4711), Network(4712)
    for index in range(8):
        assert here.namespace(index) != there.namespace(index)
        assert not set(here.control_addresses(index)) & set(there.control_addresses(index))
    assert len(Network(4_194_304).coordinator_interface(7)) <= 15


def test_a_group_that_cannot_be_made_says_so() -> None:
    with pytest.raises(OSError, match="no/such"):
        ControlGroup("no/such/parent", memory_bytes=1 << 30)


def test_the_bars_are_told_in_a_line() -> None:
    rows = [
        ROW,
        replace(ROW, said_over_was=1.11, times_solo=0.96),
        replace(ROW, asked="tensor", said_over_was=0.9, times_solo=0.2),
        replace(ROW, times_solo=None),
    ]
    assert [row.is_within for row in rows] == [True, False, True, True]
    assert [row.keeps_up for row in rows] == [True, False, True, True]
    assert summary(rows) == (
        "within 10%: 3 of 4 (75%; bar 90%); auto over the best peer alone: 0.96 at least (bar 0.97)"
    )
    assert summary([]).startswith("within 10%: 0 of 0")
    assert table(rows).row_count == len(rows)


@pytest.mark.parametrize("path", [LOCAL_CLUSTER, PREDICTIONS], ids=lambda path: path.name)
def test_the_committed_files_have_these_columns(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == [field.name for field in dataclasses.fields(Row)]
        assert all(float(row["tokens_per_s"]) > 0 for row in reader)
