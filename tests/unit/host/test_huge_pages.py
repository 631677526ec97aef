"""Hints to the system about memory: they never harm, and never fill reserved memory."""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge.host.huge_pages import (
    release_freed_memory,
    use_huge_pages,
    with_huge_pages,
)
from edge.offload import KVPool

pytestmark = pytest.mark.usefixtures("begun_anew")


def resident_bytes() -> int:
    with open("/proc/self/statm") as statistics:  # noqa: PTH123 - a kernel file
        return int(statistics.read().split()[1]) * mmap.PAGESIZE


def test_contents_stay_and_reserved_memory_stays_empty() -> None:
    weights = np.arange(1 << 22, dtype=np.float32)
    pool = KVPool(layers=[(4, 64)] * 2, slots=8, context_tokens=4096)
    before = resident_bytes()
    assert use_huge_pages() >= 0
    release_freed_memory()
    assert resident_bytes() - before < 32 << 20
    assert (weights == np.arange(1 << 22, dtype=np.float32)).all()
    pool.close()


def test_what_is_set_for_malloc_stays() -> None:
    assert with_huge_pages({"A": "1"}) == {"A": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    other = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    both = "glibc.malloc.tcache_count=0:glibc.malloc.hugetlb=1"
    assert with_huge_pages(other) == {"GLIBC_TUNABLES": both}
    against = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert with_huge_pages(against) == against


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_a_daemon_restarts_itself_with_huge_pages(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-m", "edge", "peer", "--listen", "127.0.0.1:0", "--supervised"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**plain, "EDGE_CACHE": str(tmp_path)},
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdin is not None
        assert json.loads(daemon.stdout.readline())["addresses"]
        environment = Path(f"/proc/{daemon.pid}/environ").read_bytes().split(b"\0")
        assert b"GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in environment
        daemon.stdin.close()
        assert daemon.wait(30) == 0
