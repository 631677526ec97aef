"""The change of a daemon between lending and resting, beside other events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge.membership.store import CONFIG_VARIABLE, MembershipStore
from edge.transport import parse_address
from tests.support.processes import PATIENCE_S, poll_until

_DAEMON = """
import asyncio, socket, sys, time
from pathlib import Path
import edge.cli.commands.peer as command
import edge.peer.rest as rest
from edge.cli.main import main
from edge.peer.daemon import PeerDaemon

folder = Path(sys.argv.pop(1))
rest.LOOK_EVERY_S = 0.05
command.EXIT_TIMEOUT_S = 0.2

def on_battery():
    time.sleep(float((folder / "slow").read_text()) if (folder / "slow").exists() else 0)
    return (folder / "battery").exists()

rest.on_battery = on_battery
close = PeerDaemon.aclose

async def aclose(self):
    await close(self)
    if (folder / "busy").exists():
        await asyncio.sleep(0.6)  # as for a compute kernel, which cannot be interrupted
    if (folder / "taken").exists():
        taken = socket.socket()
        taken.bind(("127.0.0.1", int(self.resources.listens_at[0].rpartition(":")[2])))
        taken.listen()
        main.taken = taken

PeerDaemon.aclose = aclose
main()
"""


@contextmanager
def resting_daemon(
    folder: Path, *more: str, config: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A daemon that runs on its battery while `folder` has a file `battery`."""
    options = (*(more or ("--insecure", "--no-announce")), "--json", "--on-battery", "off")
    command = [sys.executable, "-c", _DAEMON, str(folder), "peer", "--listen", "127.0.0.1:0"]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, *options],
            env={
                **os.environ,
                "EDGE_CACHE": str(folder / "cache"),
                CONFIG_VARIABLE: str(folder / "config"),
            },
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()


def port(process: subprocess.Popen[str]) -> int:
    """The port of the next start."""
    assert process.stdout is not None
    return parse_address(json.loads(process.stdout.readline())["addresses"][0])[1]


def await_rest(folder: Path) -> None:
    poll_until(lambda: "lends nothing" in (folder / "said").read_text())


def test_a_slow_first_look_gives_a_reason(tmp_path: Path) -> None:
    (tmp_path / "battery").touch()
    (tmp_path / "slow").write_text("1.2")
    with resting_daemon(tmp_path):
        await_rest(tmp_path)
        assert "for now: it runs on its battery" in (tmp_path / "said").read_text()


def test_a_rest_waits_for_a_kernel_that_computes(tmp_path: Path) -> None:
    (tmp_path / "busy").touch()
    with resting_daemon(tmp_path) as process:
        before = port(process)
        (tmp_path / "battery").touch()
        await_rest(tmp_path)
        (tmp_path / "battery").unlink()
        assert port(process) == before
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_another_port_is_taken_where_the_last_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with resting_daemon(tmp_path) as process:
        before = port(process)
        (tmp_path / "battery").touch()
        await_rest(tmp_path)
        (tmp_path / "taken").unlink()
        (tmp_path / "battery").unlink()
        assert port(process) not in (0, before)


def test_a_resting_daemon_tells_nobody_of_expulsions_and_says_so(tmp_path: Path) -> None:
    store = MembershipStore(tmp_path / "config")
    with resting_daemon(tmp_path, "--cluster", tmp_path.name) as process:
        port(process)
        assert store.is_telling()
        (tmp_path / "battery").touch()
        await_rest(tmp_path)
        assert not store.is_telling()
        (tmp_path / "battery").unlink()
        port(process)
        assert store.is_telling()
