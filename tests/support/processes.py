"""Real daemons and command lines, each with caches of its own; the end of each is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge.api.cluster import Cluster
from edge.cli.main import main
from edge.membership.current import CurrentMembership
from edge.protocol.peer_info import PeerInfo, describe_peer
from edge.system.heap import with_malloc_settings
from edge.transport import Credentials

EDGE = (sys.executable, "-m", "edge")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""Only what hangs takes as long: it fails a test instead of holding it up."""
_LOOK_EVERY_S = 0.002


def run_module(name: str, *arguments: object) -> None:
    """Run a module of the tests in a process of its own, where a warning is an error; it must
    succeed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", name, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


def run_bench(
    name: str, folder: Path, *options: object, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A case of `demos/bench`, with its daemons; how fast peers are is known beforehand: those
    that were measured first answer no faster."""
    program = folder / f"{name}.py"
    words = [name, *map(str, options)]
    program.write_text(f"from edge.demos.bench.__main__ import main\n\nmain({words!r})\n")
    return subprocess.run(
        [sys.executable, "-m", "tests.support.known_rates", str(program)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


class Daemon:
    """One `edge peer` with its own cache, listening on 127.0.0.1."""

    def __init__(
        self, cache: Path, *options: str, listen: str = "127.0.0.1:0", program: str = "edge"
    ) -> None:
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        self._messages = (cache / "messages").open("w+b", buffering=0)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                program,
                "peer",
                "--json",
                "--listen",
                listen,
                "--threads",
                "1",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=self._messages,
            # As it would set itself, and then begin again: a test of its own sees to that.
            env=with_malloc_settings({**os.environ, "EDGE_CACHE": str(cache)}),
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        ready = json.loads(line or "{}")
        if "name" not in ready:
            code = self.process.wait()
            self.close()
            raise AssertionError(f"the daemon ended with {code}: {self.messages}")
        self.name: str = ready["name"]
        self.addresses: tuple[str, ...] = tuple(ready["addresses"])
        self.address = self.addresses[0]
        self.port = int(self.address.rpartition(":")[2])

    @property
    def messages(self) -> str:
        """What it wrote on standard error; a daemon that does well writes nothing."""
        return (self.cache / "messages").read_text()

    @property
    def shards(self) -> Path:
        return self.cache / "shards"

    def describe(self) -> PeerInfo:
        return asyncio.run(describe_peer(self.address, own_credentials()))

    def kill(self) -> None:
        """As a power cut would end it."""
        self.process.kill()
        self.process.wait()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def await_free(self, timeout_s: float = PATIENCE_S) -> PeerInfo:
        """Ask until it holds no model; each question is a round trip of its own."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            info = self.describe()
            if not info.models and info.free_bytes == info.memory_bytes - info.floor_bytes:
                return info
            assert time.monotonic() < deadline_s, f"still held: {info.models}"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._messages.close()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def stopped(process: subprocess.Popen[Any]) -> Iterator[None]:
    """It stands still: its connections stay open, and it says nothing."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def start_together(*starts: Callable[[], Daemon]) -> Iterator[list[Daemon]]:
    """Several daemons in the time of one; closed at the end."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(starts)) as pool:
        futures = [pool.submit(start) for start in starts]
        daemons = [stack.enter_context(future.result()) for future in futures]
        pool.shutdown()
        yield daemons


@contextlib.contextmanager
def cluster_of_daemons(folder: Path, *options: tuple[str, ...]) -> Iterator[Cluster]:
    """Peers with the keys of the session, which command lines have, too; named as local ones."""
    starts = [
        partial(Daemon, folder / str(number), "--no-announce", "--name", f"local-{number}", *each)
        for number, each in enumerate(options, start=1)
    ]
    with (
        start_together(*starts) as daemons,
        Cluster.connect([daemon.address for daemon in daemons]) as cluster,
    ):
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one line of a command that failed as it should: no traceback, nothing on stdout."""
        assert self.code == 1, (self.code, self.out, self.err)
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("edge: "), self.err
        return lines[0].removeprefix("edge: ")


def edge(*arguments: object, stdin: str | None = None) -> Outcome:
    """A command line, run in this process by the same entry point."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        # This process goes on, with one thread: where more of them wait for each other, they spin.
        for command in ("peer", "quantize"):
            name = f"edge.cli.commands.{command}.limit_blas_threads"
            patch.setattr(name, lambda _threads: None)
        if stdin is not None:
            patch.setattr(sys, "stdin", io.StringIO(stdin))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([str(each) for each in arguments])
            except SystemExit as end:
                code = end.code
    assert isinstance(code, int)
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue())


@contextlib.contextmanager
def edge_process(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    program: str = "edge",
    **options: Any,
) -> Iterator[subprocess.Popen[str]]:
    """A command line in a process of its own, killed at the end if it still runs.

    program: or `tests.support.known_rates`, whose peers are not measured.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", program, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def poll_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """What `condition` returns once it is true; for what other processes do, which tell nobody."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(_LOOK_EVERY_S)  # who is waited for needs the core
    return result


@functools.cache
def own_credentials() -> Credentials:
    """What a coordinator of this session shows."""
    return CurrentMembership("tests").credentials()


@contextlib.contextmanager
def ctrl_c_once_asleep(function: str) -> Iterator[None]:
    """Ctrl-C, once, when the main thread sleeps in `function`, which that does not wake up.

    The system may hand a signal to any thread, but the handler runs in the main one. What it gets
    as it falls asleep does not wake it, either.
    """
    main = threading.main_thread()
    state = Path(f"/proc/self/task/{main.native_id}/stat")

    def is_asleep() -> bool:
        assert main.ident is not None
        frame = sys._current_frames()[main.ident]
        return frame.f_code.co_name == function and state.read_text().split()[2] == "S"

    def press() -> None:
        poll_until(is_asleep)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
