"""Daemons of this machine that may be killed, stopped and started again, each at its address."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Self

import psutil

from edge.demos.processes import child, daemon_address


class Fleet:
    """A context manager; at its end all have ended."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        options: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Each keeps its weights in a folder of its name in `folder`; options: of `edge peer`, by
        name."""
        self._names = tuple(names)
        self.folder = folder
        self._options = options or {}
        self._open: dict[str, contextlib.ExitStack] = {}
        self.processes: dict[str, Popen[str]] = {}
        self.addresses: dict[str, str] = {}

    def start(self, name: str) -> None:
        """One that does not run; where it listened before, if it did."""
        stack = contextlib.ExitStack()
        listen = self.addresses.get(name, "127.0.0.1:0")
        command = [sys.executable, "-m", "edge", "peer", "--json", "--supervised", "--no-announce"]
        command += ["--listen", listen, "--threads", "1", "--name", name]
        command += self._options.get(name, ())
        self.processes[name] = stack.enter_context(child(command, cache=self.folder / name))
        self._open[name] = stack
        self.addresses[name] = daemon_address(self.processes[name], name)

    def kill(self, name: str) -> None:
        """As a power cut would end it."""
        self.processes[name].kill()
        self.processes[name].wait()

    def leave(self, name: str) -> None:
        """As its user ends it."""
        self.processes[name].terminate()

    def stop(self, name: str) -> None:
        """It is silent until `go_on`, and its connections stay."""
        psutil.Process(self.processes[name].pid).suspend()

    def go_on(self, name: str) -> None:
        psutil.Process(self.processes[name].pid).resume()

    def renew(self) -> list[str]:
        """Restart the daemons that have ended; their names."""
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        for name in ended:
            self._open.pop(name).close()
            self.start(name)
        return ended

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                self.start(name)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            for each in self._open.values():
                stack.enter_context(each)
            for process in self.processes.values():
                if process.poll() is None:
                    psutil.Process(process.pid).resume()
