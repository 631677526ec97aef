"""Two fresh devices, each in a network of its own: a command on each from nothing to two daemons of
one cluster, and one more for an answer over both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.demos.bundled import MODEL
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.state_paths import STATE_VARIABLE
from edge.membership.store import CONFIG_VARIABLE
from tests.support.processes import PATIENCE_S
from tests.support.slow_cases import shown_in_parts

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None,
    reason="networks of their own need root, and iproute2",
)

QUESTION = ("-p", "Where does the cat live?", "-n", "6", "--parallel", "pipeline")


class Device:
    """A network namespace, and folders that no other device sees."""

    def __init__(self, folder: Path, name: str, namespace: str) -> None:
        self.name = name
        self.folder = folder / name
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
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def devices(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Device, Device]]:
    """With a cable between them, and the addresses of this kind of network: IPv4, IPv6 of the site,
    or what each device gives itself."""
    network = getattr(request, "param", "10.77.0.{}/24")
    run = uuid.uuid4().hex[:8]
    first, second = names = [f"edgepair-{run}-{name}" for name in ("attic", "kitchen")]
    with contextlib.ExitStack() as stack:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        cable = f"ip link add lan netns {first} type veth peer name lan netns {second}"
        subprocess.run(cable.split(), check=True)
        for number, name in enumerate(names, start=1):
            commands = ["link set lan up", "link set lo up"]
            if network is not None:
                commands.insert(0, f"address add {network.format(number)} dev lan nodad")
            for command in commands:
                subprocess.run(["ip", "-netns", name, *command.split()], check=True)
        attic, kitchen = (Device(tmp_path, name.rpartition("-")[2], name) for name in names)
        yield attic, kitchen


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=PATIENCE_S)[1]
    found: dict[str, Any] = json.loads(line)
    assert "error" not in found, found
    return found


@shown_in_parts("multiprocess/test_pairing_devices.py", "e2e/test_pinned_peers.py")
@pytest.mark.parametrize(
    "devices", ["10.77.0.{}/24", "fd77::{}/64", None], ids=["v4", "v6", "local"], indirect=True
)
def test_three_commands_to_an_answer_over_both(devices: tuple[Device, Device]) -> None:
    attic, kitchen = devices
    with contextlib.ExitStack() as stack:

        def lending(device: Device, *code: str) -> subprocess.Popen[str]:
            options = "--lend", "--name", device.name, "--json"
            return stack.enter_context(device.started("pair", *code, *options))

        inviting = lending(attic)
        joining = lending(kitchen, *said(inviting)["code"].split())
        for process, other in ((joining, attic), (inviting, kitchen)):
            assert said(process)["paired"]["name"] == other.name
        for process in (joining, inviting):
            assert said(process)["addresses"], "it is a peer that is ready"
        with attic.started("run", str(MODEL), *QUESTION) as asking:
            answer, told = asking.communicate(timeout=PATIENCE_S)
        assert asking.returncode == 0, told
    assert "In the barn." in answer
    for device in devices:  # each has computed a part of it
        assert list((device.folder / "cache" / "shards").glob("*"))
