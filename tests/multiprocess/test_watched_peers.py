"""`edge peers --watch`: on a terminal, and for programs. And terminals that are left by SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import PATIENCE_S, Daemon, edge_process, stopped
from tests.support.processes import edge as run_edge
from tests.support.terminal import CTRL_C, Terminal


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), "--no-announce", "--name", "vm") as daemon:
        yield daemon


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended"
    return line


def await_line(process: subprocess.Popen[str], beginning: str) -> str:
    """Before it, and in it, only what a busy machine adds: who answers late is silent meanwhile,
    and who computes slowly is told as slow."""
    while not re.match(beginning, line := line_of(process)):
        assert re.search("is silent for|is lost for|answers again|slow", line), line
    return line


def test_a_line_for_each_change(
    daemon: Daemon, tmp_path: Path, tiny_checkpoint: Callable[..., TinyCheckpoint]
) -> None:
    second = Daemon(tmp_path / "second", "--no-announce", "--name", "vm")
    with second, edge_process(
        "peers", "--watch", "--every", 0.1, "--peer", daemon.address, "--peer", second.address
    ) as watch:  # fmt: skip
        first, other = line_of(watch), line_of(watch)
        assert {first.partition(" ")[0], other.partition(" ")[0]} == {"vm", "vm-2"}
        name = first.partition(" ")[0] if second.address in first else other.partition(" ")[0]
        path = tiny_checkpoint("llama").path
        with edge.Cluster.connect(second.address) as cluster:
            cluster.propose(path)
        with edge.Cluster.connect(second.address) as cluster, cluster.load(path) as model:
            await_line(watch, f"{name} (answers again, )?runs llama int4")
            (loaded,) = json.loads(run_edge("ps", "--peer", second.address, "--json").out)
            assert (loaded["name"], loaded["dtype"]) == ("llama", "int4")
            assert [each["peer"] for each in loaded["shards"]] == ["vm"]
            assert "llama" in run_edge("ps", "--peer", second.address).out
            model.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True)
            (told,) = json.loads(run_edge("peers", "--peer", second.address, "--json").out)
            assert told["models"][0]["slower"] > 0, "its steps were compared with the prediction"
        assert run_edge("ps", "--peer", second.address).out == "No model is loaded on 1 peer.\n"
        await_line(watch, f"{name} (answers again, )?no longer runs llama int4")
        with stopped(second.process):
            await_line(watch, f"{name} is silent for ")
        await_line(watch, f"{name} answers again")
        second.kill()
        await_line(watch, f"{name} is gone")
        watch.send_signal(signal.SIGINT)
        out, messages = watch.communicate(timeout=PATIENCE_S)
        assert (watch.returncode, out, messages) == (0, "", "")


def test_lines_of_json_of_peers_that_zeroconf_finds(tmp_path: Path) -> None:
    here = ("--cluster", f"test-{uuid.uuid4().hex[:12]}", "--interface", "127.0.0.1")
    with edge_process("peers", "--watch", "--json", *here) as watch:
        with Daemon(tmp_path / "daemon", *here, "--name", "attic") as found:
            joined = json.loads(line_of(watch))
            assert joined.keys() == {"at", "event", "peer"}
            assert (joined["event"], joined["peer"]["name"]) == ("joined", "attic")
            assert joined["peer"]["address"] == found.address
            run_edge("memory", "attic", "3GiB", *here)
            changed = json.loads(line_of(watch))
            assert (changed["event"], changed["peer"]["memory_bytes"]) == ("changed", 3 << 30)
            assert found.end() == 0
        while (gone := json.loads(line_of(watch)))["event"] == "changed":
            assert gone["peer"]["is_leaving"], "it was looked at as it left"
        assert (gone["event"], gone["peer"]["name"]) == ("gone", "attic")
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(PATIENCE_S) == -signal.SIGTERM


def test_an_interface_that_is_not_there_is_told(tmp_path: Path) -> None:
    told = run_edge("peers", "--watch", "--interface", "no-such-0").sentence()
    assert "cannot look for peers: this device has no interface 'no-such-0'" in told


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM"])
def test_a_table_on_a_terminal_that_is_left_clean(end: str, daemon: Daemon, tmp_path: Path) -> None:
    options = ("--every", 0.1, "--peer", daemon.address)
    with Terminal("peers", "--watch", *options, state=tmp_path) as terminal:
        terminal.wait_for("Ctrl-C ends.")
        assert daemon.address in terminal.text
        terminal.resize(60, 20)
        terminal.wait_for("No room for")
        if end == "Ctrl-C":
            terminal.send(CTRL_C)
            assert terminal.end() == 0
        else:
            assert terminal.terminate() == signal.SIGTERM
        assert terminal.is_as_found()


def test_a_terminal_is_as_before_when_the_chat_is_told_to_end(
    talker: Path, daemon: Daemon, tmp_path: Path
) -> None:
    with Terminal("chat", talker, "--peer", daemon.address, state=tmp_path) as terminal:
        terminal.wait_for_prompt()
        assert not terminal.is_as_found(), "the editor has it"
        assert terminal.terminate() == signal.SIGTERM
        assert terminal.is_as_found()
    daemon.await_free()


TOLD_TO_END_IN_THE_EDITOR = """
import asyncio, os, signal
from prompt_toolkit.application import Application
from edge.cli.main import main

async def work(_editor):
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

Application._poll_output_size = work
main()
"""


def test_a_chat_that_is_told_to_end_while_its_editor_works_ends(
    talker: Path, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tells of no failure, and wants no key."""
    program = tmp_path / "chat.py"
    program.write_text(TOLD_TO_END_IN_THE_EDITOR)
    monkeypatch.setattr("tests.support.terminal.EDGE", (sys.executable, program))
    with Terminal("chat", talker, "--peer", daemon.address, state=tmp_path) as terminal:
        assert terminal.end() == -signal.SIGTERM
        assert terminal.is_as_found()
        assert terminal.last_line in ("", ">")
        assert "Press" not in terminal.text
    daemon.await_free()
