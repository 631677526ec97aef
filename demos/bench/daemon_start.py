"""How long a daemon takes from its start to its first answer, and to whom.

python -m edge.demos.bench.daemon_start

A daemon that is announced asks those it finds who was expelled meanwhile, before it answers another
member than its own device and the one that made the cluster. Here it finds nobody, so another
member waits as long as any has to. Who asks does so as soon as the daemon says that it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Figures
from edge.demos.processes import daemon_address
from edge.host.cache_paths import CACHE_VARIABLE
from edge.membership.membership import Membership, credentials
from edge.membership.store import CONFIG_VARIABLE, MembershipStore
from edge.protocol.peer_info import describe_peer
from edge.transport import Credentials

PLAIN = "insecure"


@contextlib.contextmanager
def started(keys: Path, *options: str) -> Iterator[str]:
    """Its address, once it is ready."""
    command = [sys.executable, "-m", "edge", "peer", "--json", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--interface", "127.0.0.1", *options],
        env={**os.environ, CONFIG_VARIABLE: str(keys), CACHE_VARIABLE: str(keys / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield daemon_address(process, keys.name)
        finally:
            process.send_signal(signal.SIGINT)


def measure(rounds: int) -> Figures:
    """Those who ask take turns."""
    found = Figures()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "attic"
        attic = MembershipStore(keys).founded("attic")
        assert attic.authority is not None
        cellar = Membership.enrolled(attic.authority, attic.tag_key, "cellar")
        who: dict[str, Credentials | None] = {
            PLAIN: None,
            "with keys, to its own device": credentials(lambda: attic),
            "with keys, to another member": credentials(lambda: cellar),
        }
        for number in range(rounds):
            took = {}
            for name in who if number % 2 else reversed(who):
                options = ("--insecure",) if name == PLAIN else ()
                begin_s = time.perf_counter()
                with started(keys, *options) as address:
                    asyncio.run(describe_peer(address, who[name]))
                    took[name] = time.perf_counter() - begin_s
            for name, answered_s in took.items():
                found.add(name, "s", answered_s)
                if name != PLAIN:
                    found.add(f"{name} - {PLAIN}", "s", answered_s - took[PLAIN])
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@append_option
def main(rounds: int, append: bool) -> None:
    """Seconds from the start of a daemon to its first answer, with and without keys."""
    results.publish(
        measure(rounds).metrics(),
        question="a daemon, from its start to its first answer",
        variant="edge peer, announced; nobody else is there",
        link="loopback",
        model="none",
        keep=append,
    )


if __name__ == "__main__":
    main()
