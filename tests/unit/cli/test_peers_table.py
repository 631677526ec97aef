"""`edge peers` in terminals of any width."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from edge.cli.commands.peers import COLUMNS, LEAST_WANTED_LAST, show_peers
from edge.cli.records import Columns, columns_that_fit
from edge.protocol.description import HostedModel
from edge.protocol.peer_info import PeerInfo
from tests.support.peer_infos import peer_info

MIB = 1 << 20


def peer(name: str, *, loaded: bool) -> PeerInfo:
    model = HostedModel(
        name="model",
        dtype="int4",
        stage=0,
        rank=1,
        sums="links",
        bytes=700 * MIB,
        buffer_bytes=30 * MIB,
        streamed_bytes=90 * MIB,
        host_bytes=0,
        kv_bytes=100 * MIB,
        kv_host_bytes=0,
        kv_disk_bytes=50 * MIB,
        user="u",
    )
    return peer_info(
        name,
        address="192.168.178.117:50051",
        processor="AMD EPYC 7B13 [64-Core]",
        threads=8,
        memory_bytes=3000 * MIB,
        floor_bytes=115 * MIB,
        free_bytes=2000 * MIB,
        model_free_bytes=2000 * MIB,
        kv_prefix_bytes=7 * MIB,
        kv_beginnings_bytes=3 * MIB,
        models=(model,) if loaded else (),
    )


PEERS = [peer("attic", loaded=True), peer("living-room", loaded=False)]


def shown(width: int | None) -> list[str]:
    out = io.StringIO()
    show_peers(Console(file=out, width=width or 80), PEERS, width=width)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 100, 160, 200])
def test_a_table_is_no_wider_than_the_terminal(width: int) -> None:
    lines = shown(width)
    table = [line for line in lines if line[0] in "┏┃┡│└"]
    assert max(map(len, table)) <= width
    for word in ("attic", "name", "address"):
        assert any(word in line for line in table)
    if width >= 80:
        assert any("192.168.178.117:50051" in line for line in table), "in one line"
        assert any("2.0 GiB of 2.9 GiB" in line for line in table)


def test_all_columns_in_one_line_for_each_peer() -> None:
    lines = shown(None)
    (row,) = (line for line in lines if "living-room" in line)
    (attic,) = (line for line in lines if "57.0 MiB" in line)
    assert "ort on AMD EPYC 7B13 [64-Core], 8 threads" in row
    assert all(size in attic for size in ("600.0 MiB", "103.0 MiB", "57.0 MiB"))
    assert all(column in lines[1] for column in COLUMNS)
    assert lines[-1] == (
        "attic runs model int4 for u, stage 0, rank 1: 700.0 MiB and 30.0 MiB for steps, 90.0 MiB "
        "from disk for each token"
    )


def test_what_is_left_out_is_said() -> None:
    assert shown(80)[-1].startswith("No room for ")
    assert "KV on disk: --wide shows all." in shown(80)[-1]
    assert not any("No room" in line for line in shown(None))


def test_what_matters_least_goes_first() -> None:
    columns: Columns[str] = dict.fromkeys(COLUMNS, str)
    kept = [
        columns_that_fit(["x" * 12], columns, width, least_wanted_last=LEAST_WANTED_LAST)
        for width in (142, 141, 126, 125, 55, 1)
    ]
    assert kept[0] == list(COLUMNS)
    assert kept[1] == kept[2] == [each for each in COLUMNS if each != "in host memory"]
    assert kept[3] == kept[2][:-1]
    assert kept[4] == ["name", "address", "free memory"]
    assert kept[5] == ["name", "address"]


def test_daemons_of_one_machine_share_what_is_free() -> None:
    pooled = [
        replace(each, memory_pool="m", pool_free_bytes=2100 * MIB)
        for each in (peer("one", loaded=False), peer("two", loaded=False))
    ]
    out = io.StringIO()
    show_peers(Console(file=out, width=200), pooled, width=None)
    assert "one, two share the memory of one machine, and 2.1 GiB of it are free" in out.getvalue()
