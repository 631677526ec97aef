"""Each start of a daemon has a greater epoch than those before, whatever the clock says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edge.membership.store import MembershipStore


def start(folder: Path) -> int:
    with MembershipStore(folder).numbered() as (number, epoch):
        assert number == 0
        return epoch


def test_it_grows_also_where_the_clock_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    assert first == pytest.approx(time.time_ns() // 1000, abs=600e6)
    monkeypatch.setattr(time, "time_ns", lambda: 10**15)
    second = start(tmp_path)
    assert second > first
    assert start(tmp_path) > second


def test_daemons_at_once_count_apart_and_a_damaged_count_begins_anew(tmp_path: Path) -> None:
    store = MembershipStore(tmp_path)
    with store.numbered() as (one, _), store.numbered() as (other, epoch):
        assert (one, other) == (0, 1)
        assert epoch < 1 << 52
    for damaged in (b"", b"no number", b"9" * 30):
        (tmp_path / "peer-0.lock").write_bytes(damaged)
        assert 0 < start(tmp_path) < 1 << 52
