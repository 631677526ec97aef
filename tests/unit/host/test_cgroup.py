"""Limits of containers and services, in both forms in which the kernel tells them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from edge.host.cgroup import memory_left_bytes, processors, tightest_group, usable_cores

GIB = 1 << 30
NO_LIMIT = str((1 << 63) - 4096)
"""What the older interface says when there is none."""


class Groups:
    """A made-up tree of control groups, and what the kernel says of our place in it."""

    def __init__(self, folder: Path, membership: str, files: Mapping[str, object]) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"
        self.membership.write_text(membership)
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")

    def memory(self) -> int | None:
        return memory_left_bytes(root=self.root, membership=self.membership)

    def processors(self) -> float | None:
        return processors(root=self.root, membership=self.membership)


V1 = "4:memory:/outer/inner\n3:cpuset:/\n2:cpu,cpuacct:/outer\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/\n", {"memory.max": 4 * GIB, "memory.current": GIB}, 3 * GIB),
        ("0::/\n", {"memory.max": "max", "memory.current": GIB}, None),
        ("0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
        ("0::/\n", {"memory.max": 4 * GIB}, None),
        ("0::/\n", {"memory.max": "garbage", "memory.current": "garbage"}, None),
        ("", {"memory.max": 4 * GIB, "memory.current": GIB}, None),
        (
            "0::/user/edge.service\n",
            {"user/edge.service/memory.max": 2 * GIB, "user/edge.service/memory.current": GIB,
             "user/memory.max": "max", "user/memory.current": 9 * GIB},
            GIB,
        ),
        (
            "0::/user/edge.service\n",
            {"user/edge.service/memory.max": 5 * GIB, "user/edge.service/memory.current": GIB,
             "user/memory.max": 6 * GIB, "user/memory.current": 4 * GIB},
            2 * GIB,
        ),
        ("0::/", {"memory.max": "max", "memory.high": 3 * GIB, "memory.current": GIB}, 2 * GIB),
        (
            "0::/",
            {"memory.max": 4 * GIB, "memory.current": 4 * GIB,
             "memory.stat": f"anon 5\ninactive_file {3 * GIB}"},
            3 * GIB,
        ),
        (
            V1,
            {"memory/outer/inner/memory.limit_in_bytes": NO_LIMIT,
             "memory/outer/inner/memory.usage_in_bytes": GIB,
             "memory/outer/memory.limit_in_bytes": 4 * GIB,
             "memory/outer/memory.usage_in_bytes": 3 * GIB,
             "memory/outer/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}"},
            2 * GIB,
        ),
        (
            V1,
            {"memory/outer/memory.limit_in_bytes": NO_LIMIT,
             "memory/outer/memory.usage_in_bytes": GIB},
            None,
        ),
        (  # in a container: its group is the root that it sees
            "4:memory:/docker/abc\n",
            {"memory/memory.limit_in_bytes": 4 * GIB, "memory/memory.usage_in_bytes": GIB},
            3 * GIB,
        ),
        ("0::/../other\n", {"memory.max": GIB, "memory.current": 0}, None),
    ],
)  # fmt: skip
def test_memory_that_is_left(
    tmp_path: Path, membership: str, files: dict[str, object], left: int | None
) -> None:
    assert Groups(tmp_path, membership, files).memory() == left


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        ("0::/a\n", {"a/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "150000 100000"}, 1.5),
        (
            V1,
            {"cpu,cpuacct/outer/cpu.cfs_quota_us": 25_000,
             "cpu,cpuacct/outer/cpu.cfs_period_us": 100_000},
            0.25,
        ),
        (
            V1,
            {"cpu/outer/cpu.cfs_quota_us": -1, "cpu/outer/cpu.cfs_period_us": 100_000},
            None,
        ),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
    ],
)  # fmt: skip
def test_processor_time_that_is_allowed(
    tmp_path: Path, membership: str, files: dict[str, object], count: float | None
) -> None:
    assert Groups(tmp_path, membership, files).processors() == count


def test_this_machine_can_be_asked() -> None:
    left, count = memory_left_bytes(), processors()
    assert left is None or left >= 0
    assert count is None or count > 0


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 2), ("900000 100000", 8)],
)
def test_threads_are_as_many_as_the_group_leaves_the_time_of(
    allowed: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.host.cgroup.allowed_cores", lambda: list(range(8)))
    groups = Groups(tmp_path, "0::/\n", {"cpu.max": allowed})
    assert usable_cores(root=groups.root, membership=groups.membership) == cores


def test_processes_of_one_limited_group_find_the_same_number(tmp_path: Path) -> None:
    """The group that limits counts, not the one that a process is in."""
    limits = {"pod/memory.max": 4 * GIB, "pod/memory.current": GIB, "pod/a/x": "", "pod/b/x": ""}
    numbers = set()
    for name in "ab":
        groups = Groups(tmp_path, f"0::/pod/{name}\n", limits)
        found = tightest_group(root=groups.root, membership=groups.membership)
        assert found is not None
        assert found.left_bytes == 3 * GIB
        numbers.add(found.number)
    assert len(numbers) == 1
