"""What every test gets: caches of its own, and a check that nothing is left running."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import onnxruntime
import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.state_paths import STATE_VARIABLE
from edge.membership.store import CONFIG_VARIABLE
from edge.system.kind import PORTABLE
from tests.support import passing_time
from tests.support.forked import IMPORTED, MODULE, ForkingPopen, Original

if TYPE_CHECKING:
    from tests.support.checkpoints import TinyCheckpoint

# `huggingface_hub` reads these where it is imported: no test sees its user's models, or a network.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(Path(__file__).parent / "no-hub-cache")}

JOIN_TIMEOUT_S = 60.0
"""How long something that is already ending may take before it counts as left behind."""

LEAST_FREE_BYTES = 1 << 30
"""On the disk with the tests' folders, where a module begins; the largest test takes 0.7 GB."""

HAVE_DAEMONS = ("multiprocess", "e2e")
"""Folders of tests."""

COMES_FIRST = "test_lora.py"
"""It takes long to import peft: as the last module it would run alone."""

Opened = TypeVar("Opened", bound=contextlib.AbstractContextManager[Any])

_shared: set[threading.Thread | int] = set()
"""Threads, and ids of processes, that outlive the module that needed them first."""

# Else numbers and texts of whichever modules of ours happen to be loaded are among the examples.
providers.is_local_module_file = lambda _path: False  # type: ignore[assignment,attr-defined]

settings.register_profile(
    "steady",
    derandomize=True,  # a run of the tests finds what every other run finds
    deadline=None,  # and a slow machine nothing else
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def edge_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every cache, and every key, of this process and of the daemons it starts lies in folders of
    the session: they are of one cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("edge-cache")))
        patch.setenv(STATE_VARIABLE, str(tmp_path_factory.mktemp("edge-state")))
        patch.setenv(CONFIG_VARIABLE, str(tmp_path_factory.mktemp("edge-keys")))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """`python -m edge` is forked, not begun anew, and so are modules of tests."""
    originals = {kind: Original(kind, on_start=_shared.add) for kind in IMPORTED}
    originals[MODULE] = Original.of_this_process(_shared.add)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkingPopen, "originals", originals, raising=False)
        patch.setattr(subprocess, "Popen", ForkingPopen)
        yield
    for original in originals.values():
        original.close()


@pytest.fixture(scope="session", autouse=True)
def threads_of_sessions() -> Iterator[None]:
    """The threads of ONNX Runtime belong to each session, as long as no test of this process has
    set them for all: sessions of other tests would fail afterwards. Processes that are forked or
    begun anew may set them, and the tests of an adapter's faces, which have a process to
    themselves."""
    if os.environ.get("EDGE_TESTED_PROVIDER") == "webgpu":
        yield
        return
    tests, chosen = os.getpid(), onnxruntime.set_global_thread_pool_sizes

    def choose(between: int, within: int) -> None:
        assert os.getpid() != tests, "a back end is tested in a process of its own: `run_module`"
        chosen(between, within)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "set_global_thread_pool_sizes", choose)
        yield


@pytest.fixture(scope="module", autouse=True)
def patient(request: pytest.FixtureRequest) -> Iterator[None]:
    """Who has daemons of its own lets them take their time; others show what limits do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in HAVE_DAEMONS:
            passing_time.be_patient(patch.setattr, patch.setitem, imports=True)
        yield


@pytest.fixture(scope="module")
def begun_anew(forked_processes: None) -> Iterator[None]:
    """Processes of the module are not forked: it is about how they start, or what they take."""
    (usual,) = ForkingPopen.__bases__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", usual)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported to collect the tests is not searched for garbage, then or later; and what
    tests leave, at the end of each module more than in between."""
    gc.disable()
    gc.set_threshold(20_000)
    try:
        return (yield)
    finally:
        _let_records_reach_the_root()
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != COMES_FIRST)
    if PORTABLE:
        for item in items:
            if item.get_closest_marker("linux_ways"):
                item.add_marker(pytest.mark.skip(reason="ways that only Linux has are not used"))


@pytest.fixture(scope="session", autouse=True)
def garbage_of_the_session() -> Iterator[None]:
    """What modules have frozen at their ends is searched once more."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # pytest searches five times more as it ends,
    atexit.register(gc.unfreeze)  # and Python once, which triton takes for leaks if nothing goes


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Ctrl-C ends what the tests start, also where they run in the background of a shell, which
    starts such programs, and all that they start, deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def room_to_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ends the run with one sentence where every daemon to come would fail in its own way."""
    free = shutil.disk_usage(tmp_path_factory.getbasetemp()).free
    why = ""
    if not Path(sys.executable).exists():
        why = f"{sys.executable} has gone while the tests ran: install it again, and run them anew"
    elif free < LEAST_FREE_BYTES:
        why = f"the disk has {free >> 20} MB left for tests: free 1 GB, or set TMPDIR"
    if why:
        request.session.shouldfail = why
        pytest.fail(why, pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fails a test that leaves a thread or a process behind.

    An event loop that a module shares keeps its idle workers; those are the module's to end.
    """
    yield from _check_nothing_left(ignored_threads=("asyncio_",))


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running_by_the_module() -> Iterator[None]:
    """The same for what a module shares, and collects what may warn of an open socket or file.

    What outlives the module, such as what it has imported, is searched again at the end of all.
    """
    yield from _check_nothing_left(ignored_threads=())
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def shared_by_a_folder(opened: Callable[[], Opened]) -> Iterator[Opened]:
    """For a fixture of a folder's modules: what it starts is not left behind by any of them."""
    threads, processes = set(threading.enumerate()), _children()
    with opened() as thing:
        started = (set(threading.enumerate()) - threads) | (_children() - processes)
        _shared.update(started)
        yield thing
    _shared.difference_update(started)


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


def _let_records_reach_the_root() -> None:
    """Those of torch and transformers: pytest puts its handlers on each of their 58 loggers that
    keep records to themselves, and takes them off again, six times for each test."""
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def _check_nothing_left(*, ignored_threads: tuple[str, ...]) -> Iterator[None]:
    """`ignored_threads` are beginnings of names."""
    threads, processes = set(threading.enumerate()), _children()
    yield
    if _shared:  # its event loop's workers may come at any time, and end with it
        ignored_threads += ("asyncio_",)
    started = [
        thread
        for thread in set(threading.enumerate()) - threads - _shared
        if not thread.name.startswith(ignored_threads)
    ]
    end_s = time.monotonic() + JOIN_TIMEOUT_S
    for thread in started:
        thread.join(max(0.0, end_s - time.monotonic()))
    running = []
    for pid in _children() - processes - _shared:
        with contextlib.suppress(psutil.NoSuchProcess):
            running.append(psutil.Process(pid))
    _gone, running = psutil.wait_procs(running, timeout=JOIN_TIMEOUT_S)
    left = [f"thread {thread.name}" for thread in started if thread.is_alive()]
    left += [f"process {process.pid}: {_command(process)}" for process in running]
    assert not left, f"left running: {', '.join(left)}"


def _children() -> set[int]:
    """Ids of our own processes; those that they started belong to others once they have ended.

    The system lists them by the thread that started them, and hands them to another one when that
    ends. One that moves while we read can be missed, but not by two readings that agree. Looking
    through all processes of the system takes a hundred times as long.
    """
    before = _children_by_thread()
    while (found := _children_by_thread()) != before:
        before = found
    return {process for children in found.values() for process in children}


def _children_by_thread() -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    with os.scandir("/proc/self/task") as threads:
        for thread in threads:
            with contextlib.suppress(OSError):  # it has ended
                file = os.open(f"{thread.path}/children", os.O_RDONLY)
                try:
                    found[thread.name] = frozenset(map(int, os.read(file, 1 << 16).split()))
                finally:
                    os.close(file)
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error as error:
        return str(error)
