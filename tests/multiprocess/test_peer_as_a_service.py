"""A daemon as a service runs it: options from a file, a log that others read, an end by SIGTERM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import edge
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon

pytestmark = pytest.mark.usefixtures("begun_anew")


def test_options_from_a_file_and_a_log_of_json(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    log = tmp_path / "peer.log"
    file = tmp_path / "edge.toml"
    file.write_text(
        'name = "attic"\nno-announce = true\nlog-format = "json"\nlog-level = "info"\n'
        f'log-file = "{log}"\nthreads = 7\n'
    )
    with Daemon(tmp_path / "daemon", "--config", str(file)) as daemon:
        assert daemon.name == "attic"
        assert daemon.describe().threads == 1, "the command line outweighs the file"
        with (
            edge.Cluster.connect(daemon.address) as cluster,
            cluster.load(tiny_checkpoint("llama").path) as model,
        ):
            model.generate("hi", max_new_tokens=1)
        daemon.await_free()
        assert daemon.end() == 0
        assert daemon.messages == "", "all of it is in the file"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(line.keys() == {"at", "level", "logger", "message"} for line in lines)
    messages = [line["message"] for line in lines]
    assert messages[0] == f"attic listens on {daemon.address}"
    assert any(" loaded " in each and " of llama" in each for each in messages)
    assert messages[-1] == "attic ends"


def test_a_daemon_says_nothing_unless_something_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "peer.log"
    with Daemon(tmp_path / "daemon", "--no-announce", "--log-file", str(log)) as daemon:
        assert daemon.end() == 0
        assert daemon.messages == ""
    assert log.read_text() == ""
