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

from edge.offload import KVPool
from edge.system.heap import (
    release_freed_memory,
    use_huge_pages,
    with_malloc_settings,
)

pytestmark = [pytest.mark.usefixtures("begun_anew"), pytest.mark.linux_ways]


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


HUGE, ONE_ARENA = "glibc.malloc.hugetlb=1", "glibc.malloc.arena_max=1"


@pytest.mark.parametrize(
    ("known", "then"),
    [
        ("glibc.malloc.tcache_count=0", f"glibc.malloc.tcache_count=0:{HUGE}:{ONE_ARENA}"),
        ("glibc.malloc.hugetlb=0", f"glibc.malloc.hugetlb=0:{ONE_ARENA}"),
        ("glibc.malloc.arena_max=4", f"glibc.malloc.arena_max=4:{HUGE}"),
    ],
)
def test_what_is_set_for_malloc_stays(known: str, then: str) -> None:
    assert with_malloc_settings({"A": "1", "GLIBC_TUNABLES": known}) == {
        "A": "1",
        "GLIBC_TUNABLES": then,
    }
    assert with_malloc_settings({}) == {"GLIBC_TUNABLES": f"{HUGE}:{ONE_ARENA}"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_a_daemon_restarts_itself_with_malloc_set_up(tmp_path: Path) -> None:
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
        environment = Path(f"/proc/{daemon.pid}/environ").read_bytes()
        # Before 2.39 glibc puts a null byte behind each setting that it has read.
        settings = environment.replace(b"\0", b":")
        assert f"GLIBC_TUNABLES={HUGE}:{ONE_ARENA}:".encode() in settings
        daemon.stdin.close()
        assert daemon.wait(30) == 0


FREED = """
import ctypes
from pathlib import Path
from edge.system.heap import ask_for_huge_pages, keep_allocations_together
from edge.system.heap import leave_holes, release_freed_memory
from edge.system.pages import HUGE_PAGE_BYTES

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
collapse = 25

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256

def heap():
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return [(int(start, 16), int(end, 16)) for start, end in ends]

def collapsed():  # as the system does in the background, in its own time
    for start, end in heap():
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        for address in range(first, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE_BYTES), collapse)
    return resident_mib()

def holes():
    large = []
    for _ in range(64):
        large.append(libc.malloc(1 << 20))
        ctypes.memset(large[-1], 1, 1 << 20)
        ctypes.memset(libc.malloc(200 << 10), 1, 200 << 10)
    for block in large:
        libc.free(ctypes.c_void_p(block))
    release_freed_memory()

keep_allocations_together()
holes()
before = resident_mib()
leave_holes()
left = collapsed() - before
ask_for_huge_pages()
print(left, collapsed() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_what_loading_freed_is_not_filled_again() -> None:
    told = subprocess.run(
        [sys.executable, "-c", FREED],
        env=with_malloc_settings(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    left, filled = map(float, told.stdout.split())
    if filled < 32:
        pytest.skip("this system makes no huge pages on request (Linux before 6.1)")
    assert left < 8
