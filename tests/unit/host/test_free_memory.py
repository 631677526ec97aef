"""Sizes as people write and read them, and what a peer offers when it is not told."""

from __future__ import annotations

import pytest

from edge.errors import RequestError
from edge.host import free_memory
from edge.host.free_memory import format_size, parse_size, process_memory, usable_memory_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * GIB),
        ("4 gib", 4 * GIB),
        (" 4Gi ", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("4G", 4 * 10**9),
        ("500MB", 500 * 10**6),
        ("500 mb", 500 * 10**6),
        ("0.5k", 500),
        ("100KiB", 102_400),
        ("1TiB", 1 << 40),
        ("12345", 12345),
        ("12b", 12),
        (12345, 12345),
    ],
)
def test_sizes_that_people_write(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "4 GiBs", "-1", "1e9", "4,5GiB", "nan", "inf", "0", "0.1", "9999999TiB", 0, -5,
     1 << 60, True, None, 1.5, ["4GiB"]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(RequestError, match="4GiB"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 * GIB, "3.0 GiB"),
        (2000 * GIB, "2.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_that_people_read(size: int, text: str) -> None:
    assert format_size(size) == text


def offer(
    monkeypatch: pytest.MonkeyPatch, *, available: int, left_by_groups: int | None = None
) -> int:
    """What is offered with so much available, and so much left by the control groups."""

    class System:
        class Memory:
            pass

        @classmethod
        def virtual_memory(cls) -> Memory:
            found = cls.Memory()
            found.available = available  # type: ignore[attr-defined]
            return found

    monkeypatch.setattr(free_memory, "psutil", System)
    monkeypatch.setattr(free_memory, "memory_left_bytes", lambda: left_by_groups)
    return usable_memory_bytes()


def test_a_reserve_stays_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offer(monkeypatch, available=16 * GIB) == 15 * GIB
    assert offer(monkeypatch, available=GIB) == GIB // 2, "half where there is little"
    assert offer(monkeypatch, available=0) == 0


@pytest.mark.parametrize(
    ("left", "offered"), [(3 * GIB, 2 * GIB), (0, 0), (100 * GIB, 15 * GIB), (None, 15 * GIB)]
)
def test_the_control_groups_limit_counts(
    monkeypatch: pytest.MonkeyPatch, left: int | None, offered: int
) -> None:
    assert offer(monkeypatch, available=16 * GIB, left_by_groups=left) == offered


def test_this_process_is_measured() -> None:
    memory = process_memory()
    assert 0 < memory["resident_bytes"] <= memory["peak_bytes"] * 1.1
