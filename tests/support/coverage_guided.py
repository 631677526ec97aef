"""Inputs are changed at random; what reaches a branch of Edge that none before has is changed on.

`python -m tests.support.coverage_guided frames 100000 --seed 7` tries that many frames, and keeps
those that show more than what is kept so far: see `kept_inputs`. What ends in another error than
Edge's own, takes seconds or too much memory ends the run, and is left in a file, which `--again`
tries alone. It needs `pip install atheris`, which is libFuzzer for Python.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import atheris

from tests.support.kept_inputs import MOST_BYTES, Target, joined, keep, kept, parted

TARGETS = {"frames": "mutated_frames", "files": "mutated_files", "talks": "hostile_talks"}
"""And the module whose `target` opens it."""

MOST_S = 60
"""For one input, on a machine that others use, too."""

MOST_MIB = 1536
"""Of the process that tries them."""

_LONGEST = 1 << 17

_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A disk that is fast."""


def opened(name: str) -> AbstractContextManager[Target]:
    """The target of this name."""
    module = importlib.import_module(f"tests.support.{TARGETS[name]}")
    target: AbstractContextManager[Target] = module.target()
    return target


def serve(name: str, only: str, options: list[str]) -> None:
    """As libFuzzer's process: it tries what that chooses, and begins with what is sound here. Other
    processes have other keys.

    libFuzzer ends the process at once, so nothing is closed: see `started`."""
    stack = contextlib.ExitStack()
    with atheris.instrument_imports(include=["edge"]):  # their branches are counted
        target = stack.enter_context(opened(name))
    for folder in [each for each in map(Path, options) if each.is_dir()][:1]:
        written(folder, [joined(*each) for each in target.sound if only in each[0]], "sound")

    def attempt(data: bytes) -> None:
        if data:  # it begins with nothing at all
            target.outcome(*parted(data))

    def change(data: bytes, most_bytes: int, seed: int) -> bytes:
        kind, content = parted(data)
        changed = joined(kind, target.changed(content, random.Random(seed)))
        return changed if len(changed) <= most_bytes else data

    # What libFuzzer starts once more for itself, by a shell, is this.
    itself = shlex.join([sys.executable, "-m", __spec__.name, "--serve", name, only])
    atheris.Setup([itself, *options], attempt, custom_mutator=change)
    atheris.Fuzz()


def started(name: str, only: str, *options: str | Path) -> None:
    """Ends with what it ends with, unless all is well."""
    limits = f"-timeout={MOST_S}", f"-rss_limit_mb={MOST_MIB}", f"-max_len={_LONGEST}"
    # Branches, and not how often each was taken: else thousands are kept.
    others = "-use_counters=0", f"-artifact_prefix={tempfile.gettempdir()}/edge-{name}-"
    command = [sys.executable, "-m", __spec__.name, "--serve", name, only, *limits, *others]
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:  # what the process leaves is in it
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run([*command, *map(str, options)], env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def written(folder: Path, inputs: Iterable[bytes], called: str = "kept") -> Path:
    """One file for each."""
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(inputs):
        (folder / f"{called}-{number}").write_bytes(data)
    return folder


def main() -> None:
    """Try many, and keep what shows more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1, help="from 1 on")
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    parser.add_argument("--again", type=Path, help="only what is in this file")
    given = parser.parse_args()
    if given.again:
        started(given.target, "", given.again)
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        folder = Path(name)
        with opened(given.target) as target:
            sound, lasting = set(target.sound), set(filter(target.lasting, dict(target.sound)))
        before = kept(given.target, {kind for kind, _ in sound})
        found = written(
            folder / "found", (joined(*each) for each in before if given.only in each[0])
        )
        limits = f"-runs={given.count}", f"-seed={given.seed}"
        started(given.target, given.only, found, *limits)
        # Of all that is short enough, what shows something beyond the sound ones, and no more.
        short = {
            data
            for data in (
                *(joined(*each) for each in before),
                *(path.read_bytes() for path in found.iterdir()),
            )
            if len(data) <= MOST_BYTES and parted(data)[0] in lasting
        }
        least = written(folder / "least", ())
        started(given.target, "", "-merge=1", least, written(folder / "short", short))
        chosen = {parted(path.read_bytes()) for path in least.iterdir()} - sound
        chosen = {each for each in chosen if each[0] in lasting}
        num_bytes = keep(given.target, chosen)
    print(f"{len(chosen)} are kept (before: {len(before)}), in {num_bytes >> 10} KiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
