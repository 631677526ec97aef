"""The ways that every system has do what Linux's own do."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge.system import files, kind, locks, pages, private_text, processes, signals, sockets
from edge.transport import TcpLink
from tests.architecture.test_names import run_python

MODULES = (files, pages, private_text, processes, signals, sockets)


@pytest.fixture(params=[False, True], ids=["own", "portable"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in MODULES:
        monkeypatch.setattr(module, "PORTABLE", request.param)
    return bool(request.param)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield found
    os.close(found)


def test_reads_and_writes_at_a_place(descriptor: int) -> None:
    assert files.write_at(descriptor, b"abcdef", 0) == 6
    assert files.write_at(descriptor, memoryview(b"XY"), 2) == 2
    assert files.read_at(descriptor, 3, 1) == b"bXY"
    assert files.read_at(descriptor, 9, 4) == b"ef"
    into = memoryview(bytearray(4))
    assert files.read_into(descriptor, into, 3) == 3
    assert bytes(into) == b"Yef\0"
    assert files.read_into(descriptor, into, 6) == 0
    files.forget_pages(descriptor)
    files.read_ahead(descriptor, 0, 6)
    files.expect_random_reads(descriptor)


def test_threads_read_at_their_own_places(descriptor: int) -> None:
    content = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert files.write_at(descriptor, content, 0) == len(content)
    wrong: list[int] = []

    def read(first: int) -> None:
        for offset in range(first, len(content) - 64, 4096):
            if files.read_at(descriptor, 64, offset) != content[offset : offset + 64]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 64, 128, 192)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_room_is_allocated_or_refused(descriptor: int) -> None:
    files.allocate(descriptor, 1000, 5000)
    assert os.fstat(descriptor).st_size == 6000
    files.allocate(descriptor, 0, 10)
    assert os.fstat(descriptor).st_size == 6000
    with pytest.raises(OSError, match=r".") as refused:
        files.allocate(descriptor, 0, 1 << 60)
    assert refused.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_a_nameless_file_leaves_no_name(tmp_path: Path) -> None:
    descriptor = files.nameless_file(tmp_path)
    files.write_at(descriptor, b"secret", 0)
    assert files.read_at(descriptor, 6, 0) == b"secret"
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_a_lock_keeps_another_descriptor_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    one, other = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert locks.lock_now(one, is_shared=True)
    assert locks.lock_now(other, is_shared=True)
    assert not locks.lock_now(other)
    os.close(one)
    assert locks.lock_now(other)
    os.close(other)


def test_a_private_file_is_there_for_a_moment() -> None:
    with private_text.as_private_file(b"key") as path:
        assert Path(path).read_bytes() == b"key"
        assert not Path(path).stat().st_mode & 0o077 or path.startswith("/proc/")
    assert not Path(path).exists()


def test_memory_is_private_and_advice_harms_nothing() -> None:
    with pages.private_memory(1 << 20) as memory:
        memory[:4] = b"abcd"
        pages.advise(memory, "huge")
        pages.advise(memory, "not huge", 0, 1 << 16)
        assert memory[:4] == b"abcd"
        pages.advise(memory, "drop")


def test_links_move_large_messages_both_ways_at_once() -> None:
    first, second = socket.socketpair()
    one, other = TcpLink(first, "other", timeout_s=20), TcpLink(second, "one", timeout_s=20)
    large = np.arange(3 << 20, dtype=np.uint8)
    found = [np.zeros_like(large), np.zeros_like(large)]
    thread = threading.Thread(target=lambda: other.exchange(large[::-1].copy(), found[1]))
    thread.start()
    one.exchange(large, found[0])
    thread.join()
    assert (found[1] == large).all()
    assert (found[0] == large[::-1]).all()
    empty = np.zeros(0, np.float32)
    one.send(empty)
    other.receive(empty)
    one.close()
    other.close()


def test_a_signal_reaches_the_loop() -> None:
    async def main() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        signals.on_signal(loop, signal.SIGUSR1, told.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(told.wait(), 20)
        signals.no_longer_on_signal(loop, signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL

    signals.run_in_loop(main())
    assert signal.set_wakeup_fd(-1) == -1, "the sockets that woke the loop are closed with it"


def test_cores_and_memory_are_told() -> None:
    assert processes.allowed_cores()
    assert processes.peak_memory_bytes() > 1 << 20
    processes.yield_core()


@pytest.mark.parametrize(
    ("libc", "maxsize", "said"),
    [("glibc", 1 << 63, None), ("", 1 << 63, "no glibc"), ("glibc", 1 << 31, "32 bits")],
)
def test_a_python_without_wheels(
    libc: str, maxsize: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(sys, "maxsize", maxsize - 1)
    reason = kind.why_no_wheels()
    assert (reason is None) == (said is None)
    assert said is None or (reason is not None and said in reason)


def test_a_missing_package_is_a_sentence(way: bool) -> None:
    if way:
        return
    code = (
        "import sys; sys.modules['zeroconf'] = None\n"
        "from edge.cli.main import main; main(['peers'])"
    )
    result = run_python("-c", code)
    assert result.returncode == 1
    expected = "edge: the package zeroconf is missing; install Edge anew, with pip\n"
    assert result.stderr == expected
