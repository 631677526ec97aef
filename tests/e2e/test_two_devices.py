"""Two fresh devices, each in a network of its own: two commands on each from nothing to two daemons
of one cluster, and then an answer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.demos.bundled import MODEL
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.state_paths import STATE_VARIABLE
from edge.membership.store import CONFIG_VARIABLE
from tests.support.processes import PATIENCE_S

LIMIT_S = 30.0
"""From the first command to the answer, where nothing else runs."""

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None,
    reason="networks of their own need root, and iproute2",
)


class Device:
    """A network namespace, and folders that no other device sees."""

    def __init__(self, folder: Path, name: str, namespace: str) -> None:
        self.name = name
        self._prefix = ("nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-m", "edge")
        self.folder = folder / name
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("EDGE_")},
            "HOME": str(self.folder),
            CONFIG_VARIABLE: str(self.folder / "keys"),
            CACHE_VARIABLE: str(self.folder / "cache"),
            STATE_VARIABLE: str(self.folder / "state"),
        }

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
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

    def edge(self, *arguments: str) -> str:
        with self.started(*arguments) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        return out


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Device]]:
    """Two, with a cable between them."""
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
        yield [Device(tmp_path, name.rpartition("-")[2], name) for name in names]


def waited_for_cores_s() -> float:
    """In which somebody on this machine had to wait for a core: another test, perhaps."""
    pressure = Path("/proc/pressure/cpu")
    with contextlib.suppress(OSError):
        return int(pressure.read_text().splitlines()[0].rpartition("total=")[2]) / 1e6
    return 0.0


def test_two_commands_on_each_and_an_answer(devices: list[Device]) -> None:
    attic, kitchen = devices
    begun_s = time.monotonic() - waited_for_cores_s()
    with attic.started("pair", "--name", "attic", "--json") as pairing:
        assert pairing.stdout is not None
        code = json.loads(pairing.stdout.readline())["code"]
        kitchen.edge("pair", *code.split(), "--name", "kitchen")
        assert json.loads(pairing.stdout.readline())["paired"]["name"] == "kitchen"
        assert pairing.wait(PATIENCE_S) == 0
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(each.started("peer", "--name", each.name, "--json"))
            for each in devices
        ]
        for device, peer in zip(devices, peers, strict=True):
            assert peer.stdout is not None
            assert json.loads(peer.stdout.readline())["name"] == device.name
        question = ("-p", "Where does the cat live?", "-n", "6", "--parallel", "pipeline")
        said = attic.edge("run", str(MODEL), *question)
        assert time.monotonic() - waited_for_cores_s() - begun_s < LIMIT_S
        assert "In the barn." in said
        for device in devices:  # each has computed a part of it
            assert list((device.folder / "cache" / "shards").glob("*"))
