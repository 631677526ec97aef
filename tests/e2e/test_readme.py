"""Runs what README.md tells its readers to type, and looks for what it promises.

A comment above a block says how it is run:

    <!-- run: TEXT -->    and its standard output must contain TEXT
    <!-- daemons: N -->   N times in the background, while all `run` blocks are run
    <!-- tested by … -->  by something else; that is checked here too

So that a test neither finds strangers' peers nor is found by them, the `edge` on its PATH adds a
cluster name of its own and the loopback interface to commands that look for peers.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code and the comment above it."""

    how: str
    note: str
    language: str
    code: str


def read_blocks() -> list[Block]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    fences = re.finditer(
        r"(?:^<!-- ([^\n]*) -->\n)?^```(bash|python)\n(.*?)^```$", text, re.M | re.S
    )
    blocks: list[Block] = []
    for fence in fences:
        comment, language, code = fence.groups()
        how, _colon, note = (comment or "").partition(": ")
        blocks.append(Block(how=how, note=note, language=language, code=code))
    return blocks


BLOCKS = read_blocks()
RUN = [block for block in BLOCKS if block.how == "run"]
DAEMONS = [block for block in BLOCKS if block.how == "daemons"]
ELSEWHERE = [block for block in BLOCKS if block.how.startswith("tested by .ci/run")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An `edge` first on the PATH that keeps to this machine and to this test."""
    folder = tmp_path_factory.mktemp("bin")
    python = shlex.quote(sys.executable)
    edge = folder / "edge"
    edge.write_text(
        "#!/bin/sh\n"
        f"here='--cluster readme-{uuid.uuid4().hex} --interface 127.0.0.1'\n"
        'case "$* " in\n'
        "  *'--local '*) here= ;;\n"
        '  peer\\ *) here="$here --listen 127.0.0.1:0" ;;\n'
        "esac\n"
        f'exec {python} -m edge "$@" $here\n'
    )
    edge.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "160"}


@pytest.fixture(scope="module")
def daemons(environment: dict[str, str]) -> Iterator[list[str]]:
    """What the daemons of the README say when they are ready; they run until the last test."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for block in DAEMONS:
            for _ in range(int(block.note)):
                process = subprocess.Popen(
                    ["sh", "-c", block.code],
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                processes.append(process)
        lines: list[str] = []
        for process in processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        yield lines
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        for process in processes:
            process.communicate(timeout=PATIENCE_S)


def test_every_block_is_tested_somewhere() -> None:
    assert RUN
    assert len(RUN) + len(DAEMONS) + len(ELSEWHERE) == len(BLOCKS)
    assert all(block.note for block in RUN)


@pytest.mark.parametrize("block", ELSEWHERE, ids=lambda block: block.code.strip())
def test_what_ci_runs_is_what_the_readme_says(block: Block) -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    if block.code.startswith("make "):
        assert f"\n{block.code}" in script
    else:
        install = (REPOSITORY / "scripts" / "install-cpu").read_text()
        assert block.code == "pip install .\n"
        assert "pip install" in install
        assert '"${@:-.}"' in install
        assert "\nscripts/install-cpu " in script


def test_the_daemons_say_where_they_listen(daemons: list[str]) -> None:
    assert len(daemons) == 2
    for line in daemons:
        assert " listens on 127.0.0.1:" in line


@pytest.mark.usefixtures("daemons")
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.code.split("\n", 1)[0])
def test_the_block_does_what_it_says(block: Block, environment: dict[str, str]) -> None:
    shell = (
        ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    )
    result = subprocess.run(
        [*shell, block.code],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert block.note in result.stdout
