"""What a user waits for at the start: of a cached model, and after the install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.host.cache_paths import CACHE_VARIABLE

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "first-reply"
_TOLD = re.compile(r"first reply over two peers after (\d+) s: (\d+) s to install")


@case.case(
    "start of a cached model",
    case.shape(),
    case.block_size(32),
    case.number("--threads", 2),
    case.rounds(5),
    case.FOLDER,
)
def start(given: Given) -> Iterator[Found]:
    """How long `edge run` takes from the command to the first token, and to its end.

    One local peer is started by the command itself, so two Python processes are in it. The first
    round fills the caches, and does not count.
    """
    command = [sys.executable, "-m", "edge", "run", str(given.path), "-p", "hello"]
    command += ["-n", "8", "--local", "1", "--threads", str(given.threads), "--dtype", "int4-pure"]
    command += ["--block-size", str(given.block_size)]
    environment = {**os.environ, CACHE_VARIABLE: str(given.folder / "cache")}
    figures = Figures()
    for number in range(given.rounds + 1):
        begin_s = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, bufsize=0
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            first_s = time.perf_counter() - begin_s
            process.stdout.read()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        if number:
            figures.add("to the first token", "s", first_s)
            figures.add("to the end, 8 tokens", "s", time.perf_counter() - begin_s)
    yield Found(
        figures=figures,
        variant=f"edge run --local 1, int4-pure/{given.block_size}, {given.threads} threads",
        model=given.model,
    )


@case.case("a newcomer's first reply", case.rounds(3))
def first_reply(given: Given) -> Iterator[Found]:
    """How long a newcomer waits: from the install to the first reply over two peers.

    Each round runs scripts/first-reply in an environment of its own, with no caches from before.
    What pip downloads does not count.
    """
    figures = Figures()
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [_SCRIPT, Path(folder) / "venv"]
            done = subprocess.run(
                command, cwd=_SCRIPT.parents[1], capture_output=True, text=True, check=False
            )
        if (told := _TOLD.search(done.stdout)) is None:
            raise SystemExit(f"{_SCRIPT} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        figures.add("to the first reply", "s", int(told[1]))
        figures.add("of it, to install", "s", int(told[2]))
    yield Found(
        figures=figures,
        variant="pip install ., then edge run --local 2 --parallel pipeline",
        model="bundled (1.3 M)",
    )
