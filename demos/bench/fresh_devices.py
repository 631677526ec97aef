"""How long two fresh devices take from the first command to an answer over both of them.

python -m edge.demos.bench.fresh_devices

Each is a network namespace with folders of its own, and a cable lies between them: root can make
these, with iproute2. Three commands are given, as a newcomer types them: `edge pair --lend` on one,
the same with the code on the other, and `edge run` where the checkpoint is. Nobody has to read or
to type the six words: that time is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Figures
from edge.demos.bundled import MODEL
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.state_paths import STATE_VARIABLE
from edge.membership.store import CONFIG_VARIABLE

QUESTION = ("-p", "Where does the cat live?", "-n", "6", "--parallel", "pipeline")
_PATIENCE_S = 240.0
"""For a process that hangs."""


class Device:
    """A network namespace, and folders that no other device sees."""

    def __init__(self, folder: Path, name: str, namespace: str) -> None:
        self.name = name
        self.folder = folder / name
        self.commands: list[tuple[str, ...]] = []
        """Commands of `edge` that were given here."""
        self._prefix = ("nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-m", "edge")
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("EDGE_")},
            "HOME": str(self.folder),
            CONFIG_VARIABLE: str(self.folder / "keys"),
            CACHE_VARIABLE: str(self.folder / "cache"),
            STATE_VARIABLE: str(self.folder / "state"),
        }

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """`edge` with these arguments, which is interrupted at the end."""
        self.commands.append(arguments)
        process = subprocess.Popen(
            [*self._prefix, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=_PATIENCE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of three commands, in seconds since the first of them."""

    lending_s: float
    """Both devices were members of one cluster, and lent."""
    answer_s: float
    answer: str


@contextlib.contextmanager
def two_devices(folder: Path) -> Iterator[tuple[Device, Device]]:
    """With a cable between them."""
    run = uuid.uuid4().hex[:8]
    names = [f"edgepair-{run}-{name}" for name in ("attic", "kitchen")]
    with contextlib.ExitStack() as stack:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        first, second = names
        cable = f"ip link add lan netns {first} type veth peer name lan netns {second}"
        subprocess.run(cable.split(), check=True)
        for number, name in enumerate(names, start=1):
            for command in (
                f"address add 10.77.0.{number}/24 dev lan",
                "link set lan up",
                "link set lo up",
            ):
                subprocess.run(["ip", "-netns", name, *command.split()], check=True)
        attic, kitchen = (Device(folder, name.rpartition("-")[2], name) for name in names)
        yield attic, kitchen


def pair_and_ask(attic: Device, kitchen: Device) -> Answered:
    """From nothing to an answer. Raises RuntimeError, with what a command said, where one ends
    otherwise."""
    begin_s = time.perf_counter()
    with contextlib.ExitStack() as stack:

        def lending(device: Device, *code: str) -> subprocess.Popen[str]:
            options = "--lend", "--name", device.name, "--json"
            return stack.enter_context(device.started("pair", *code, *options))

        inviting = lending(attic)
        joining = lending(kitchen, *_said(inviting)["code"].split())
        for process, other in ((joining, attic), (inviting, kitchen)):
            if (found := _said(process)["paired"]["name"]) != other.name:
                raise RuntimeError(f"{other.name} was to be paired, not {found}")
        for process in (joining, inviting):
            _said(process)["addresses"]  # it is a peer that is ready
        lending_s = time.perf_counter() - begin_s
        with attic.started("run", str(MODEL), *QUESTION) as asking:
            answer, told = asking.communicate(timeout=_PATIENCE_S)
        answer_s = time.perf_counter() - begin_s
        if asking.returncode:
            raise RuntimeError(told)
    return Answered(lending_s=lending_s, answer_s=answer_s, answer=answer)


def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(process.communicate(timeout=_PATIENCE_S)[1])
    said: dict[str, Any] = json.loads(line)
    return said


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@append_option
def main(rounds: int, append: bool) -> None:
    """Each round begins with two devices that have nothing."""
    figures = Figures()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, two_devices(Path(folder)) as devices:
            answered = pair_and_ask(*devices)
        figures.add("to two daemons of one cluster", "s", answered.lending_s)
        figures.add("to the end of the answer", "s", answered.answer_s)
    results.publish(
        figures.metrics(),
        question="two fresh devices, from the first command to an answer over both",
        variant="edge pair --lend on each, edge run --parallel pipeline; no caches",
        link="veth between network namespaces",
        model="bundled (1.3 M)",
        keep=append,
    )


if __name__ == "__main__":
    main()
