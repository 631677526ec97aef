"""Peer daemons on this machine, started and ended by the program that uses them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

from edge.errors import NetworkError, RequestError, shown
from edge.host.cgroup import usable_cores
from edge.host.cuda_driver import num_cuda_devices
from edge.host.free_memory import parse_folder_and_size, parse_size
from edge.host.started_again import edge_command
from edge.protocol.peer_info import BACKEND_CHOICES
from edge.system.heap import with_malloc_settings
from edge.system.processes import own_session

STOP_TIMEOUT_S = 10.0
MAX_PEERS = 64
MAX_THREADS = 1024

Size = str | int


class LocalSettings(TypedDict, total=False):
    """Settings of local daemons: each takes one value, or one for each peer.

    memory: the memory limit of each process ("2GiB" or bytes), itself included; for a GPU, of its
    own memory. A daemon below its minimum, about 135 MiB, does not start. model_memory: the part of
    it for weights and KV caches. kv_memory: the part for KV caches. kv_disk ("FOLDER:SIZE"): the
    place for KV caches beyond that, see `edge peer`; several peers with one folder have a folder
    each in it, with the whole size. threads: of each; default: the cores of this machine divided.
    backend: "auto", "ort", "triton", "webgpu" or "null".
    """

    memory: Size | Sequence[Size] | None
    model_memory: Size | Sequence[Size] | None
    threads: int | Sequence[int] | None
    backend: str | Sequence[str]
    kv_memory: Size | Sequence[Size] | None
    kv_disk: str | Sequence[str] | None


class LocalPeers:
    """`edge peer` processes with real sockets on 127.0.0.1; `close` ends them.

    Each watches its standard input, and ends by itself if this process dies.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, peers: int, settings: LocalSettings, keys: Callable[[], bytes] | None) -> None:
        """Start `peers` daemons. keys: makes the keys of one member of the cluster; None: daemons
        without keys, which talk to anybody.

        Raises RequestError for counts that do not match. Not for the main thread, where a Ctrl-C
        could come between the start of a process and its place in the list.
        """
        for options in _command_lines(peers, **settings):
            self._processes.append(_spawn(options, None if keys is None else keys()))

    def addresses(self) -> list[str]:
        """The addresses of the daemons, once all listen. Raises NetworkError if one does not
        start."""
        return [_await_ready(process) for process in self._processes]

    def hang_up(self) -> None:
        """Ask the daemons to end; does not wait."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def close(self) -> None:
        """End every daemon and wait for it; kill those that do not react."""
        self.hang_up()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()


def _command_lines(
    peers: int,
    *,
    memory: Size | Sequence[Size] | None = None,
    model_memory: Size | Sequence[Size] | None = None,
    threads: int | Sequence[int] | None = None,
    backend: str | Sequence[str] = "auto",
    kv_memory: Size | Sequence[Size] | None = None,
    kv_disk: str | Sequence[str] | None = None,
) -> list[list[str]]:
    """The options of `edge peer` for each daemon."""
    if type(peers) is not int or not 1 <= peers <= MAX_PEERS:
        raise RequestError(
            f"peers must be a whole number from 1 to {MAX_PEERS}, not {shown(peers)}"
        )
    options = [["--name", f"local-{index + 1}"] for index in range(peers)]
    sizes = {"memory": memory, "model_memory": model_memory, "kv_memory": kv_memory}
    for name, values in sizes.items():
        for each, size in zip(options, _one_each(values, peers, name), strict=True):
            if size is not None:
                each += [f"--{name.replace('_', '-')}", str(parse_size(size))]
    for each, place in zip(options, _one_each(kv_disk, peers, "kv_disk"), strict=True):
        if place is not None:
            folder, size_bytes = parse_folder_and_size(place)
            own = folder / each[1] if isinstance(kv_disk, str) and peers > 1 else folder
            each += ["--kv-disk", f"{own}:{size_bytes}"]
    cores = usable_cores()
    for each, wanted in zip(options, _one_each(threads, peers, "threads"), strict=True):
        count = max(1, cores // peers) if wanted is None else wanted
        if type(count) is not int or not 1 <= count <= MAX_THREADS:
            raise RequestError(
                f"threads must be a whole number from 1 to {MAX_THREADS}, not {shown(count)}"
            )
        each += ["--threads", str(count)]
    gpus = num_cuda_devices()
    for each, named in zip(options, _one_each(backend, peers, "backend"), strict=True):
        chosen = "auto" if named is None else named
        if chosen not in BACKEND_CHOICES:
            known = ", ".join(BACKEND_CHOICES)
            raise RequestError(
                f"backend {shown(chosen)} is not one of {known}", remedy=f"one of {known}"
            )
        each += ["--backend", chosen]
        if chosen == "triton" and gpus > 1:  # peers alternate between the GPUs
            each += ["--gpu", str(sum("--gpu" in other for other in options) % gpus)]
    return options


T = TypeVar("T", str | int, int, str)


def _one_each(value: T | Sequence[T] | None, peers: int, name: str) -> Sequence[T | None]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != peers:
            raise RequestError(
                f"{len(value)} values of {name} for {peers} peers",
                remedy="give one, or one for each",
            )
        return list(value)
    return [value] * peers


def _spawn(options: list[str], keys: bytes | None) -> subprocess.Popen[bytes]:
    command = [*edge_command(), "peer", "--listen", "127.0.0.1:0", "--supervised"]
    process = subprocess.Popen(
        command + options + ["--handed-keys" if keys else "--insecure"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_malloc_settings(os.environ),
        # Ctrl-C is for the program, which ends its daemons itself.
        **own_session(),
    )
    if keys:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why itself
            process.stdin.write(keys + b"\n")
            process.stdin.flush()
    return process


def _await_ready(process: subprocess.Popen[bytes]) -> str:
    """A supervised daemon writes one line of JSON once it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        return str(json.loads(line)["addresses"][0])
    except (ValueError, KeyError, IndexError, TypeError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        how = f"ended with exit code {process.returncode}"
        if process.returncode is None:
            how = "does not tell its address"
        raise NetworkError(
            f"a local peer did not start: it {how}",
            remedy="its own message, on standard error, says why",
        ) from None
