"""What a daemon promises when it is asked, when it is not, and inside a control group."""

from __future__ import annotations

import pytest

from edge.errors import RequestError
from edge.memory import baseline
from edge.memory.baseline import budget_bytes, process_baseline
from edge.memory.ledger import Baseline, Ledger

MIB = 1 << 20
BASELINE = Baseline(process_bytes=80 * MIB, work_bytes=40 * MIB)
OWN = 50 * MIB


def promise(
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    *,
    free: int,
    usable: int,
    left: int | None = None,
) -> int:
    monkeypatch.setattr(baseline, "process_memory", lambda: {"anonymous_bytes": OWN})
    monkeypatch.setattr(baseline, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(baseline, "usable_memory_bytes", lambda *, reserve, spare_bytes: usable)
    monkeypatch.setattr(baseline, "memory_left_bytes", lambda: left)
    return budget_bytes(asked, BASELINE)


def test_what_is_asked_for_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert promise(monkeypatch, 300 * MIB, free=0, usable=0) == 300 * MIB


def test_never_more_than_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = promise(monkeypatch, 300 * MIB, free=0, usable=0, left=200 * MIB)
    assert found == 200 * MIB + OWN


def test_nothing_asked_is_what_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert promise(monkeypatch, None, free=900 * MIB, usable=450 * MIB) == 450 * MIB + OWN


def test_where_little_is_free_the_baseline_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would be below the minimum, and all of it is not."""
    assert promise(monkeypatch, None, free=100 * MIB, usable=50 * MIB) == BASELINE.minimum_bytes
    too_little = promise(monkeypatch, None, free=60 * MIB, usable=30 * MIB)
    with pytest.raises(RequestError, match="below the minimum"):
        Ledger(budget_bytes=too_little, baseline=BASELINE)


def test_this_process_has_a_baseline() -> None:
    assert process_baseline().process_bytes > 10 * MIB
