"""Two fresh devices, each in a network of its own: a command on each from nothing to two daemons of
one cluster, and one more for an answer over both."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edge.demos.bench.fresh_devices import pair_and_ask, two_devices
from tests.support.slow_cases import shown_in_parts

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None,
    reason="networks of their own need root, and iproute2",
)


@shown_in_parts("multiprocess/test_pairing_devices.py", "e2e/test_pinned_peers.py")
def test_three_commands_to_an_answer_over_both(tmp_path: Path) -> None:
    with two_devices(tmp_path) as devices:
        answered = pair_and_ask(*devices)
        assert "In the barn." in answered.answer
        typed = [command[0] for device in devices for command in device.commands]
        assert typed == ["pair", "run", "pair"]
        for device in devices:  # each has computed a part of it
            assert list((device.folder / "cache" / "shards").glob("*"))
