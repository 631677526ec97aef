"""GGUF files of random shapes, made by another Python, and what a token reads of one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from edge.demos.bench import gguf_file, llama_logits
from edge.demos.shapes import checkpoint
from edge.offload import GgufFile

_TABLE, _HEAD = "token_embd.weight", "output.weight"


def gguf_of(shape: str, folder: Path, *, python: str, form: str = "Q4_0") -> Path:
    """The shape's weights in a form, made if the file is not there. SystemExit if it cannot be.

    llama.cpp itself makes those that its Python package has no formula for.
    """
    target = folder / f"{shape}-{form.lower()}.gguf"
    if not target.exists() and form not in gguf_file.FORMS:
        source = gguf_of(shape, folder, python=python, form="F16")
        _made([python, llama_logits.__file__, "quantise", str(source)], target, form)
    elif not target.exists():
        written_gguf(checkpoint(shape, folder), target, python=python, form=form)
    return target


def written_gguf(path: Path, target: Path, *, python: str, form: str) -> Path:
    """A checkpoint of Llama's form in one of `gguf_file.FORMS`, made if the file is not there.
    SystemExit if it cannot be."""
    if not target.exists():
        _made([python, gguf_file.__file__, str(path)], target, form)
    return target


def _made(command: list[str], target: Path, form: str) -> None:
    partial = target.with_suffix(".partial")
    command += [str(partial), form]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(
            f"{command[0]} cannot make a GGUF file; it needs numpy, gguf and llama-cpp-python"
        )
    partial.rename(target)


@contextlib.contextmanager
def llama_process(
    python: str, script: ModuleType, *arguments: object
) -> Iterator[Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """A function that asks llama.cpp in a process of its own, as the script describes
    (`llama_pictures`)."""
    assert script.__file__ is not None
    command = [python, script.__file__, *map(str, arguments)]
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        stdin, stdout = process.stdin, process.stdout

        def ask(asked: Mapping[str, Any]) -> dict[str, Any]:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            told: dict[str, Any] = json.loads(stdout.readline())
            return told

        yield ask
        stdin.close()


def read_of_token(path: Path) -> float:
    """Bytes of a GGUF file that a token is multiplied with: not of a table of embeddings that is no
    head, and of a layer's experts as many as it goes through."""
    with GgufFile(path) as file:
        model = file.metadata["general.architecture"]
        used, count = (
            int(str(file.metadata.get(f"{model}.expert_{each}", 1)))
            for each in ("used_count", "count")
        )
        total = 0.0
        for name, tensor in file.tensors.items():
            if name != _TABLE or _HEAD not in file.tensors:
                nbytes = tensor.end - tensor.begin
                total += nbytes * (used / count if "_exps." in name else 1)
        return total
