"""Other programs in a control group, each in a Python of its own, asked line by line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge.api import llama_cpp_process
from edge.demos.bench import accelerate_side, gguf_file, llama_logits
from edge.demos.bench.file_shapes import FILE_SHAPES
from edge.demos.control_groups import ControlGroup
from edge.demos.processes import child
from edge.demos.shapes import SHAPES, checkpoint

PROMPT_TOKENS = 8

PATIENCE_S = 90.0
"""For one answer: a program that has too little memory may read the same pages for ever."""


class SideError(Exception):
    """The program ended, or was too slow to wait for; what it said is above."""


class Side:
    """One program that has said hello."""

    def __init__(self, process: subprocess.Popen[str], group: ControlGroup) -> None:
        """Raises SideError if it ends instead, as it does where it has too little memory."""
        self._process = process
        self.group = group
        self.hello = self._answer()

    def decode(self, new_tokens: int) -> tuple[float, float]:
        """(tokens per second after the first, bytes read for each). SideError if it ends."""
        assert self._process.stdin is not None
        before = self.group.bytes_read
        try:
            self._process.stdin.write(f"{PROMPT_TOKENS} {new_tokens} 1\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideError(str(error)) from error
        answer = self._answer()
        # The prompt reads all weights once, too, and is not in the time.
        read = (self.group.bytes_read - before) / new_tokens
        return (new_tokens - 1) / answer["decode_s"], read

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        impatience = threading.Timer(PATIENCE_S, self._process.kill)
        impatience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            impatience.cancel()
            impatience.join()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise SideError("a program ended, or was ended, before it answered") from None
        return answer


@contextlib.contextmanager
def llama(python: str, gguf: Path, group: ControlGroup, *, threads: int) -> Iterator[Side]:
    """llama.cpp over its mapped file."""
    command = [python, llama_cpp_process.__file__, str(gguf), str(threads), "64", "1", "mapped"]
    with child(group.joined(*command)) as process:
        yield Side(process, group)


@contextlib.contextmanager
def accelerate(
    python: str, model: Path, group: ControlGroup, *, threads: int, limit_bytes: int
) -> Iterator[Side]:
    """Accelerate in bfloat16, with layers on disk."""
    with tempfile.TemporaryDirectory(prefix="edge-offloaded-") as folder:
        command = [python, accelerate_side.__file__, str(model), str(threads), str(limit_bytes)]
        with child(group.joined(*command, folder)) as process:
            yield Side(process, group)


def _facts(shape: str, folder: Path) -> Path:
    """The named one of FILE_SHAPES, as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shape}.json"
    path.write_text(json.dumps(FILE_SHAPES[shape].facts()), encoding="utf-8")
    return path


def gguf_of(shape: str, folder: Path, *, python: str, form: str = "Q4_0") -> Path:
    """The shape's weights in a form, made if the file is not there. SystemExit if it cannot be.

    llama.cpp itself makes those that its Python package has no formula for.
    """
    target = folder / f"{shape}-{form.lower()}.gguf"
    if not target.exists():
        partial = target.with_suffix(".partial")
        source = checkpoint(shape, folder) if shape in SHAPES else _facts(shape, folder)
        command = [python, gguf_file.__file__, str(source), str(partial), form]
        if form not in ("Q4_0", "F16"):
            source = gguf_of(shape, folder, python=python, form="F16")
            command = [python, llama_logits.__file__, "quantise", str(source), str(partial), form]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise SystemExit(
                f"{python} cannot make a GGUF file; it needs numpy, gguf and llama-cpp-python"
            )
        partial.rename(target)
    return target
