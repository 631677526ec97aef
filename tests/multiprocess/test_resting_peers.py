"""A laptop whose cable is pulled out in the middle of an answer, and plugged in again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.protocol.peer_info import describe_peer
from tests.support.plans import bundled_plan
from tests.support.processes import PATIENCE_S, Daemon, own_credentials, poll_until

_POWER = Path("/sys/class/power_supply")
_LAPTOP = """
import edge.peer.rest
from edge.cli.main import main
edge.peer.rest.LOOK_EVERY_S = 0.05
main()
"""
PROMPT = [1, 2, 3]
TOKENS = 200


def status(power: Path, said: str) -> None:
    battery = power / "BAT0"
    battery.mkdir(parents=True, exist_ok=True)
    (battery / "capacity").write_text("80")
    draft = battery / "draft"
    draft.write_text(said)
    draft.replace(battery / "status")


@contextmanager
def laptop(folder: Path, power: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon for which `power` is what the system says of power supplies, and its address."""
    script = f'mount --bind "{power}" {_POWER} && exec "$@"'
    options = ("--no-announce", "--name", "laptop", "--on-battery", "off", "--threads", "1")
    process = subprocess.Popen(
        [
            *("unshare", "--mount", "sh", "-c", script, "sh"),
            *(sys.executable, "-c", _LAPTOP, "peer", "--json", "--listen", "127.0.0.1:0", *options),
        ],
        env={**os.environ, "EDGE_CACHE": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, json.loads(process.stdout.readline())["addresses"][0]
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.skipif(not _POWER.is_dir() or os.geteuid() != 0, reason="nothing can be mounted")
def test_a_laptop_hands_over_on_its_battery_and_comes_back(tmp_path: Path) -> None:
    power = tmp_path / "power"
    status(power, "Charging")
    with (
        Daemon(tmp_path / "attic", "--no-announce", "--name", "attic") as attic,
        laptop(tmp_path / "laptop", power) as (process, address),
        edge.Cluster.connect([attic.address, address]) as cluster,
    ):
        plan = bundled_plan("pipeline_2", devices=("attic", "laptop"))
        with cluster.load(MODEL, dtype="float32", plan=plan) as model:
            assert len(model.plan.devices) == 2
            expected = model.generate(PROMPT, max_new_tokens=TOKENS).token_ids
            found: list[int] = []
            for token in model.stream(PROMPT, max_new_tokens=TOKENS):
                if not found:
                    status(power, "Discharging")
                found.append(token.token_id)
            assert tuple(found) == tuple(expected)
            poll_until(lambda: len(model.plan.devices) == 1)
        assert process.stderr is not None
        assert "lends nothing for now: it runs on its battery" in process.stderr.readline()
        with pytest.raises(edge.EdgeError):
            asyncio.run(describe_peer(address, own_credentials()))
        status(power, "Charging")
        poll_until(lambda: process.stdout is not None and process.stdout.readline() != "")
        assert asyncio.run(describe_peer(address, own_credentials())).name == "laptop"
