"""Runs the commands and programs of README.md and of every page under docs/.

A comment above a block says how it is run:

    <!-- run: TEXT -->      its standard output must contain TEXT
    <!-- daemons: N -->     N times in the background, while the page's `run` blocks are run
    <!-- tested by … -->    by .ci/run or the test named, which is checked here too
    <!-- needs a GPU -->    not run here; only on the page about GPUs

Blocks of other pages than the README are slow: each shows what has tests of its own.

Blocks of a page run in its order and in one empty folder, in which only `demos` is found. Daemons
are those of the page, or of the README where a page starts none. So that a test neither finds
strangers' peers nor is found by them, the `edge` on its PATH adds a cluster name of its own and the
loopback interface to commands that look for peers. The README's commands are begun anew: that shows
nothing more on other pages, where commands are forked. How fast peers are is known beforehand;
`scripts/first-reply` has the README's first command measure them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge.system.kind import PORTABLE
from tests.support import known_rates
from tests.support.processes import PATIENCE_S
from tests.support.slow_cases import shown_in_parts

_MOST_BYTES = 128 << 10
"""Of a message: arguments and an environment."""

_CLIENT = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as relay:
    relay.connect(sys.argv[1])
    asked = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(relay, [json.dumps(asked).encode()], [0, 1, 2])
    sys.exit(int(relay.recv(16)))
"""


class _Relay:
    """A context manager; every command has ended before it does."""

    def __init__(self, folder: Path) -> None:
        """folder: of its own, with a short name."""
        self._path = folder / "relay"
        self._client = folder / "relayed.py"
        self._client.write_text(_CLIENT)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve, name="relay")

    @property
    def command(self) -> str:
        """In place of Python, in a script of the shell."""
        return shlex.join([sys.executable, "-I", "-S", str(self._client), str(self._path)])

    def __enter__(self) -> _Relay:
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                asker, _address = self._listener.accept()
            except OSError:  # it was shut down
                return
            threading.Thread(target=_run, args=(asker,), name="relayed command").start()


def _run(asker: socket.socket) -> None:
    with asker:
        message, streams, _flags, _address = socket.recv_fds(asker, _MOST_BYTES, 3)
        asked = json.loads(message)
        stdin, stdout, stderr = streams
        try:
            process = subprocess.Popen(
                [sys.executable, *asked["words"]],
                cwd=asked["folder"],
                env=asked["environment"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            for stream in streams:
                os.close(stream)
        code = process.wait()
        with contextlib.suppress(OSError):  # who asked has been killed
            asker.send(str(code if code >= 0 else 128 - code).encode())


REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md"))]
GPU_PAGES = [REPOSITORY / "docs" / "guide" / name for name in ("gpu.md", "webgpu.md")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code and the comment above it."""

    page: Path
    how: str
    note: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.code.strip().splitlines()[0]}"


def read_blocks(page: Path) -> list[Block]:
    fences = re.finditer(
        r"(?:^<!-- ([^\n]*) -->\n)?^```(bash|python)\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    blocks: list[Block] = []
    for fence in fences:
        comment, language, code = fence.groups()
        how, _colon, note = (comment or "").partition(": ")
        blocks.append(Block(page=page, how=how, note=note, language=language, code=code))
    return blocks


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN = [block for block in BLOCKS if block.how == "run"]
DAEMONS = [block for block in BLOCKS if block.how == "daemons"]
ELSEWHERE = [block for block in BLOCKS if block.how.startswith("tested by .ci/run")]
OF_THE_GUIDE = shown_in_parts(
    "e2e/test_guessed_tokens.py",
    "e2e/test_quality.py",
    "e2e/test_quantizing.py",
    "multiprocess/test_chat_terminal.py",
    "multiprocess/test_command_line.py",
    "multiprocess/test_kept_beginnings.py",
    "multiprocess/test_lost_peers.py",
    "multiprocess/test_predicted_replies.py",
    "unit/cli/test_config_file.py",
    "unit/cli/test_service_unit.py",
)
RUN_HERE = [
    pytest.param(block, marks=() if block.page == README else OF_THE_GUIDE) for block in RUN
]

IN_A_TEST = [block for block in BLOCKS if block.how.startswith("tested by tests/")]
NEED_A_GPU = [block for block in BLOCKS if block.how == "needs a GPU"]


class Page:
    """An empty folder to run a page's blocks in, and the daemons that the page starts."""

    def __init__(self, page: Path, folder: Path, relay: _Relay) -> None:
        self.daemons = [block for block in DAEMONS if block.page == page]
        self.folder = folder
        (folder / "demos").symlink_to(REPOSITORY / "demos")
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        edge, python = bin_folder / "edge", shlex.quote(sys.executable)
        edge.write_text(
            "#!/bin/sh\n"
            f"here='--cluster docs-{uuid.uuid4().hex} --interface 127.0.0.1'\n"
            'case "$* " in\n'
            "  *'--local '*) here= ;;\n"
            "  cluster\\ *|inspect\\ *|cache\\ d*|peer\\ install*) here= ;;\n"
            '  peer\\ *) here="$here --listen 127.0.0.1:0" ;;\n'
            "esac\n"
            f'[ -z "$EDGE_ANEW" ] || exec {python} -m "$EDGE_MODULE" "$@" $here\n'
            f'[ -z "$EDGE_MODULE" ] || exec {relay.command} -m "$EDGE_MODULE" "$@" $here\n'
            f'exec {python} -m edge "$@" $here\n'
        )
        edge.chmod(0o755)
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": path.rstrip(os.pathsep),
            "COLUMNS": "160",
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: list[str] = []
        """The first line that each daemon writes when it is ready."""

    def start(self) -> None:
        for block in self.daemons:
            for _ in range(int(block.note)):
                process = subprocess.Popen(
                    ["sh", "-c", block.code],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                self.processes.append(process)
        for process in self.processes:
            assert process.stdout is not None
            self.lines.append(process.stdout.readline())

    def close(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        for process in self.processes:
            process.communicate(timeout=PATIENCE_S)

    def run(self, block: Block) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, "EDGE_MODULE": known_rates.__name__}
        if block.page == README:
            environment["EDGE_ANEW"] = "1"
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
        elif block.page == README:
            known = f"from {known_rates.__name__} import know_rates\nknow_rates()\n"
            command = [sys.executable, "-c", known + block.code]
        else:
            program = self.folder / "bin" / "program.py"
            program.write_text(block.code)
            command = [sys.executable, "-m", known_rates.__name__, str(program)]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@pytest.fixture(scope="module")
def pages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Page]]:
    """Pages with daemons of their own, which run until the last test: the README, and those of
    which a block is run."""
    params = (getattr(item, "callspec", None) for item in request.session.items)
    blocks = (each.params.get("block") for each in params if each is not None)
    run = {README, *(each.page for each in blocks if isinstance(each, Block))}
    started: dict[Path, Page] = {}
    with _Relay(tmp_path_factory.mktemp("relay")) as relay:
        try:
            for path in dict.fromkeys(block.page for block in DAEMONS if block.page in run):
                started[path] = Page(path, tmp_path_factory.mktemp(path.stem), relay)
                started[path].start()
            yield started
        finally:
            for page in started.values():
                page.close()


def test_every_block_is_tested_somewhere() -> None:
    assert RUN
    others = len(DAEMONS) + len(ELSEWHERE) + len(IN_A_TEST) + len(NEED_A_GPU)
    assert len(RUN) + others == len(BLOCKS)
    assert all(block.note for block in RUN)
    assert all(block.page in GPU_PAGES for block in NEED_A_GPU)


@pytest.mark.parametrize("block", ELSEWHERE, ids=str)
def test_what_ci_runs_is_what_the_pages_say(block: Block) -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    if block.code.startswith("make "):
        assert f"\n{block.code}" in script
    else:
        install = (REPOSITORY / "scripts" / "first-reply").read_text()
        assert block.code == "pip install .\n"
        clock = install.index("\nSECONDS=0\n")
        assert install.index('rm "$scratch"/wheels/edge_inference-*.whl') < clock
        assert clock < install.index('[@]}" install --no-index --find-links "$scratch/wheels" .\n')
        assert "\nscripts/first-reply " in script


@pytest.mark.parametrize("block", IN_A_TEST, ids=str)
def test_what_a_test_runs_is_what_the_pages_say(block: Block) -> None:
    test = (REPOSITORY / block.how.removeprefix("tested by ")).read_text()
    if not block.code.startswith("edge "):
        assert f'"{block.page.name}"' in test, "it reads the page, and runs what is there"
        return
    for line in block.code.splitlines():
        program, command, *_ = line.split()
        assert program == "edge"
        assert f'"{command}"' in test


def test_the_daemons_say_where_they_listen(pages: dict[Path, Page]) -> None:
    assert len(pages[README].lines) == 2
    for page in pages.values():
        for line in page.lines:
            assert " listens on 127.0.0.1:" in line


@pytest.mark.parametrize("block", RUN_HERE, ids=str)
def test_the_block_does_what_it_says(block: Block, pages: dict[Path, Page]) -> None:
    if PORTABLE and "--model-memory 900KiB" in str(block):
        pytest.skip("layers are read from disk on Linux alone")
    result = pages.get(block.page, pages[README]).run(block)
    assert result.returncode == 0, result.stderr
    assert block.note in result.stdout
