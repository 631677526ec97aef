"""Ctrl-C, SIGTERM and SIGKILL at whatever moment: nothing runs on, nothing stays reserved."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import edge
from edge.progress import OnProgress
from tests.multiprocess.conftest import LONG_CONTEXT
from tests.support.checkpoints import TinyCheckpoint
from tests.support.plans import make_plan
from tests.support.processes import PATIENCE_S, Daemon, edge_process, poll_until
from tests.support.processes import edge as run_edge
from tests.support.replies import await_steps


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce") as daemon:
        yield daemon
        assert daemon.messages == ""


def endless_run(checkpoint: TinyCheckpoint, *options: str) -> tuple[str, ...]:
    """A command line that writes for minutes."""
    return (
        "run", str(checkpoint.path), "-p", "hi", "-n", "29000", "--context", "29500",
        "--dtype", "float32", *options,
    )  # fmt: skip


def by_hand(checkpoint: TinyCheckpoint, layout: str, folder: Path) -> tuple[str, str]:
    """Options of a run over local daemons: so nothing is measured first."""
    file = folder / "plan.json"
    plan = make_plan(checkpoint.spec, layout, model=checkpoint.path.name)
    file.write_text(json.dumps(plan.to_json()))
    return "--plan", str(file)


def children_of(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Its daemons, once it has started so many."""

    def enough() -> list[psutil.Process]:
        found = psutil.Process(process.pid).children(recursive=True)
        return found if len(found) == count else []

    found: list[psutil.Process] = poll_until(enough)
    return found


def assert_ended(processes: list[psutil.Process]) -> None:
    _gone, running = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert running == []


def test_a_killed_coordinator_leaves_the_daemon_free(
    daemon: Daemon, endless_checkpoint: TinyCheckpoint
) -> None:
    with edge_process(*endless_run(endless_checkpoint, "--peer", daemon.address)) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert len(daemon.describe().models) == 1
        process.kill()
        daemon.await_free()
    assert daemon.process.poll() is None


def test_a_killed_coordinators_own_daemons_end_by_themselves(
    endless_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    plan = by_hand(endless_checkpoint, "tensor_2", tmp_path)
    command = endless_run(endless_checkpoint, "--local", "2", *plan)
    with edge_process(*command) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        daemons = children_of(process, 2)
        process.kill()
        assert_ended(daemons)


def test_ctrl_c_while_the_local_daemons_start(endless_checkpoint: TinyCheckpoint) -> None:
    several = ("--local", "2", "--parallel", "pipeline")
    with edge_process(*endless_run(endless_checkpoint, *several)) as process:
        daemons = children_of(process, 2)
        process.send_signal(signal.SIGINT)
        _out, messages = process.communicate(timeout=PATIENCE_S)
        assert_ended(daemons)
    assert process.returncode == 130
    assert messages.strip() == "Interrupted; everything this command started was ended."


def test_ctrl_c_while_tokens_are_written(
    endless_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    plan = by_hand(endless_checkpoint, "pipeline_2", tmp_path)
    command = endless_run(endless_checkpoint, "--local", "2", *plan)
    with edge_process(*command) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        daemons = children_of(process, 2)
        process.send_signal(signal.SIGINT)
        _out, messages = process.communicate(timeout=PATIENCE_S)
        assert_ended(daemons)
    assert process.returncode == 130
    goes_on, *_empty, ended = messages.strip().splitlines()
    assert re.fullmatch(r"\[edge run --resume [0-9a-f]{8} continues this answer\]", goes_on)
    assert ended == "Interrupted; everything this command started was ended."


@pytest.mark.parametrize(
    ("phase", "block_size"), [("quantise", 16), ("hash", 32), ("send", 64), ("load", 128)]
)
def test_ctrl_c_in_every_phase_of_a_load(
    phase: str,
    block_size: int,
    daemon: Daemon,
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pressed by the first sign of progress of that phase; each block size is sent anew."""
    checkpoint = tiny_checkpoint("llama")
    pressed = threading.Event()

    @contextlib.contextmanager
    def press_ctrl_c(_show: object) -> Iterator[OnProgress]:
        def on_progress(event: edge.Progress) -> None:
            if event.phase == phase and not pressed.is_set():
                pressed.set()
                os.kill(os.getpid(), signal.SIGINT)

        yield on_progress

    monkeypatch.setattr("edge.api.async_cluster.progress_bars", press_ctrl_c)
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    outcome = run_edge(
        "run", checkpoint.path, "-p", "hi", "--peer", daemon.address, "--block-size", block_size
    )
    assert pressed.is_set()
    assert outcome.code == 130
    assert outcome.err.strip() == "Interrupted; everything this command started was ended."
    assert list(tmp_path.rglob("*.partial")) == []
    daemon.await_free()


@contextlib.contextmanager
def ctrl_c_after(event: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C once `event` returns, in another thread; the body must last until then."""

    def press() -> None:
        event()
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=press)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        watcher.join()


@pytest.mark.parametrize("moment", [1, 2, "hash", "load", "generate"])
def test_ctrl_c_at_any_moment_of_a_program(
    moment: str | int, endless_checkpoint: TinyCheckpoint
) -> None:
    """Starting (a number of daemons), loading, generating: the fixtures check that no thread or
    daemon is left."""
    before = len(psutil.Process().children())
    spec, name = endless_checkpoint.spec, endless_checkpoint.path.name
    plan = make_plan(spec, "tensor_2", model=name)  # by hand: so nothing is measured first
    reached = threading.Event()
    models: list[edge.Model] = []

    def on_progress(event: edge.Progress) -> None:
        if event.phase == moment:
            reached.set()

    def until_then() -> None:
        if isinstance(moment, int):
            poll_until(lambda: len(psutil.Process().children()) >= before + moment)
        elif reached.wait(PATIENCE_S) and models:
            await_steps(models[0])

    with ctrl_c_after(until_then), edge.Cluster.local(peers=2, threads=1) as cluster:
        model = cluster.load(
            endless_checkpoint.path,
            dtype="float32",
            plan=plan,
            context_tokens=LONG_CONTEXT,
            progress=on_progress,
        )
        models.append(model)
        reached.set()
        model.generate([1, 2, 3], max_new_tokens=LONG_CONTEXT - 3)


def test_after_ctrl_c_the_same_model_goes_on(
    daemon: Daemon, endless_checkpoint: TinyCheckpoint
) -> None:
    """In a notebook, interrupting one reply costs that reply only."""
    prompt = endless_checkpoint.prompt(4)
    with edge.Cluster.connect([daemon.address]) as cluster:
        model = cluster.load(endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT)

        def is_computed() -> bool:  # a prompt: the reply before may still count its tokens
            return model.measure()[0].prompt.steps > 0

        for _ in range(3):
            model.measure()
            with ctrl_c_after(lambda: poll_until(is_computed)):
                model.generate(prompt, max_new_tokens=LONG_CONTEXT - 4)
        expected = endless_checkpoint.greedy(prompt, 6)
        assert list(model.generate(prompt, max_new_tokens=6).token_ids) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_told_to_end_in_the_middle_of_a_step(
    number: signal.Signals, endless_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    with (
        Daemon(tmp_path, "--no-announce", "--name", "busy") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
    ):
        model = cluster.load(endless_checkpoint.path, dtype="float32", context_tokens=LONG_CONTEXT)
        stream = model.stream([5] * (LONG_CONTEXT - 10), max_new_tokens=5)
        assert daemon.end(number) == 0
        with pytest.raises(edge.PeerLostError, match="its user has stopped it") as raised:
            list(stream)  # so it has not gone on to the end of the prompt
        assert raised.value.peer == "busy"
        assert daemon.messages == ""


STUCK_DAEMON = """
import asyncio

import edge.cli.commands.peer as peer
from edge.cli.main import main
from edge.peer.daemon import PeerDaemon


async def hang(_daemon, **_options):
    await asyncio.Event().wait()


PeerDaemon.{method} = hang
peer.EXIT_TIMEOUT_S = 0.2
main(["peer", "--no-announce", "--listen", "127.0.0.1:0", "--json"])
"""


@pytest.mark.parametrize(
    ("method", "numbers"),
    [("aclose", [signal.SIGTERM]), ("leave", [signal.SIGTERM, signal.SIGINT])],
)
def test_a_daemon_that_is_not_done_ends_all_the_same(
    method: str, numbers: list[signal.Signals], tmp_path: Path
) -> None:
    """A compute kernel cannot be interrupted, and a coordinator may not let go: here both take for
    ever. Told twice, a daemon waits for no coordinator."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK_DAEMON.format(method=method)],
        stdout=subprocess.PIPE,
        env={**os.environ, "EDGE_CACHE": str(tmp_path)},
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{")
        for number in numbers:
            process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def test_ctrl_c_ends_an_idle_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--no-announce") as daemon:
        assert daemon.end(signal.SIGINT) == 0
        assert daemon.messages == ""
