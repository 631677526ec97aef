"""Daemons on this machine, started and ended by the program that uses them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

from edge.errors import NetworkError, RequestError
from edge.memory import parse_size

STOP_TIMEOUT_S = 10.0

Size = str | int


class LocalPeers:
    """`edge peer` processes with real sockets on 127.0.0.1; `close` ends them.

    Each watches its standard input: should this process die in any way, they end by themselves.
    """

    def __init__(self, processes: list[subprocess.Popen[str]], addresses: list[str]) -> None:
        self._processes = processes
        self.addresses = tuple(addresses)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the peers, in the order they were asked for."""
        return tuple(process.pid for process in self._processes)

    @classmethod
    def start(
        cls,
        *,
        peers: int,
        memory: Size | Sequence[Size] | None,
        threads: int | Sequence[int] | None,
    ) -> LocalPeers:
        """Raises RequestError for counts that do not match, NetworkError if one does not start."""
        if type(peers) is not int or not 1 <= peers <= 64:
            raise RequestError(f"peers must be 1 to 64, not {peers!r}")
        sizes = _one_each(memory, peers, "memory")
        counts = _one_each(
            max(1, (os.cpu_count() or 1) // peers) if threads is None else threads, peers, "threads"
        )
        this = cls([], [])
        try:
            for index in range(peers):
                options = ["--name", f"local-{index + 1}", "--threads", str(counts[index])]
                size = sizes[index]
                if size is not None:
                    options += ["--memory", str(parse_size(size))]
                this._processes.append(_spawn(options))
            for process in this._processes:
                address = _await_ready(process)
                this.addresses = (*this.addresses, address)
        except BaseException:
            this.close()
            raise
        return this

    def close(self) -> None:
        """End every daemon and wait for it; kill those that do not listen."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()


T = TypeVar("T", str | int, int)


def _one_each(value: T | Sequence[T] | None, peers: int, name: str) -> Sequence[T | None]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != peers:
            raise RequestError(f"{len(value)} values of {name} for {peers} peers")
        return list(value)
    return [value] * peers


def _spawn(options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edge", "peer", "--listen", "127.0.0.1:0", "--supervised"]
    return subprocess.Popen(
        command + options,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the program; it ends its daemons in its own time.
        start_new_session=True,
    )


def _await_ready(process: subprocess.Popen[str]) -> str:
    """A supervised daemon writes one line of JSON once it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        return str(json.loads(line)["addresses"][0])
    except (ValueError, KeyError, IndexError, TypeError):
        process.wait(STOP_TIMEOUT_S)
        raise NetworkError(
            f"a local peer did not start (exit code {process.returncode}); its message is above"
        ) from None
