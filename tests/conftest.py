"""What every test gets: caches of its own, and a check that nothing is left running."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from edge.paths import CACHE_VARIABLE

if TYPE_CHECKING:
    import edge
    from tests.support.checkpoints import TinyCheckpoint

JOIN_TIMEOUT_S = 10.0
"""How long something that is already ending may take before it counts as left behind."""


@pytest.fixture(scope="session", autouse=True)
def edge_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every cache of this process and of the daemons it starts lies in a folder of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("edge-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Ctrl-C ends what the tests start, also where they run in the background of a shell, which
    starts such programs, and all that they start, deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fails a test that leaves a thread or a process behind.

    An event loop that a module shares keeps its idle workers; those are the module's to end.
    """
    yield from _check_nothing_left(ignored_threads=("pytest_timeout", "asyncio_"))


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running_by_the_module() -> Iterator[None]:
    """The same for what a module shares, and collects what may warn of an open socket or file."""
    yield from _check_nothing_left(ignored_threads=("pytest_timeout",))
    gc.collect()


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., TinyCheckpoint]:
    """`make_checkpoint` without its folder; the same arguments give the same checkpoint again."""
    from tests.support.checkpoints import make_checkpoint

    @functools.cache
    def make(name: str, **variant: Any) -> TinyCheckpoint:
        return make_checkpoint(tmp_path_factory.mktemp(name) / name, name, **variant)

    return make


@pytest.fixture(scope="module")
def five_peers() -> Iterator[edge.Cluster]:
    """Five daemons on this machine, named as in `tests.support.plans.DEVICES`."""
    import edge

    with edge.Cluster.local(peers=5, threads=1) as cluster:
        yield cluster


def _check_nothing_left(*, ignored_threads: tuple[str, ...]) -> Iterator[None]:
    """`ignored_threads` are beginnings of names."""
    threads, processes = set(threading.enumerate()), _children()
    yield
    started = [
        thread
        for thread in threading.enumerate()
        if thread not in threads and not thread.name.startswith(ignored_threads)
    ]
    for thread in started:
        thread.join(JOIN_TIMEOUT_S)
    _gone, running = psutil.wait_procs(
        [process for process in _children() if process not in processes], timeout=JOIN_TIMEOUT_S
    )
    left = [f"thread {thread.name}" for thread in started if thread.is_alive()]
    left += [f"process {process.pid}: {_command(process)}" for process in running]
    assert not left, f"left running: {', '.join(left)}"


def _children() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children(recursive=True))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error as error:
        return str(error)
