"""Peers find each other: two `edge peer` daemons are discovered without any address."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import edge
from edge.demos.bundled import MODEL, ask, require, show_who_did_what

LOOPBACK = "127.0.0.1"
"""Announced on this machine's own interface only, so the demo stays off the network."""

NAMES = ("attic", "kitchen")


@contextmanager
def peers(names: Sequence[str], *, cluster: str) -> Iterator[None]:
    """Daemons as anyone would start them in a terminal; ended with the block."""
    command = [sys.executable, "-m", "edge", "peer", "--cluster", cluster, "--threads", "1"]
    command += ["--interface", LOOPBACK, "--listen", f"{LOOPBACK}:0"]
    processes: list[subprocess.Popen[str]] = []
    try:
        for name in names:
            processes.append(
                subprocess.Popen([*command, "--name", name], stdout=subprocess.PIPE, text=True)
            )
        for name, process in zip(names, processes, strict=True):
            assert process.stdout is not None
            ready = process.stdout.readline()
            require(bool(ready), f"peer {name} did not start; its message is above")
            print(f"  {ready}", end="")
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate()


def run() -> None:
    """A cluster name of its own keeps strangers' peers out."""
    name = f"demo-{uuid.uuid4().hex[:8]}"
    with (
        peers(NAMES, cluster=name),
        edge.Cluster.discover(
            name, timeout_s=30, at_least=len(NAMES), interfaces=[LOOPBACK]
        ) as cluster,
    ):
        found = {peer.name: peer.address for peer in cluster.peers}
        print(f"\n  found: {', '.join(f'{name} at {found[name]}' for name in found)}")
        require(tuple(sorted(found)) == NAMES, "both peers should have been found")
        model = cluster.load(MODEL, plan="pipeline")
        ask(model, "What is 7 plus 5?")
        show_who_did_what(model)
