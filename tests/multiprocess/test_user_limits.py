"""One device takes no more of a peer than the peer's owner gives each, and is written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import edge
from edge.errors import CapacityError
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon
from tests.support.processes import edge as edge_command


def test_each_user_has_limits(
    tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path
) -> None:
    first, second = tiny_checkpoint("llama"), tiny_checkpoint("mistral")
    large = tiny_checkpoint("llama", layers=12)
    audit = tmp_path / "audit"
    weights_bytes = (first.path / "model.safetensors").stat().st_size
    limits = f"sessions=1,cache={weights_bytes * 3 // 2},memory=1GiB"
    with (
        Daemon(tmp_path / "cache", "--each-user", limits, "--audit", str(audit)) as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
    ):
        with cluster.load(first.path, dtype="float32") as model:
            expected = first.greedy(first.prompt(5), 3)
            assert list(model.generate(first.prompt(5), max_new_tokens=3).token_ids) == expected
            with pytest.raises(CapacityError, match="1 shards loaded on this peer"):
                cluster.load(first.path, dtype="float32")
            (kept,) = _shards(daemon)
        # The weights of another model take the place of the first one's.
        with cluster.load(second.path, dtype="float32"):
            assert [kept] != _shards(daemon)
        with pytest.raises(CapacityError, match="more than one device may keep"):
            cluster.load(large.path, dtype="float32")
        assert len(_shards(daemon)) == 1
        daemon.end()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["loaded", "ended"] * 2
    assert [line["model"] for line in lines] == ["llama"] * 2 + ["mistral"] * 2
    assert len({line["device"] for line in lines}) == 1
    assert audit.stat().st_mode & 0o077 == 0


def test_plans_know_of_them(tiny_checkpoint: Callable[..., TinyCheckpoint], tmp_path: Path) -> None:
    with Daemon(tmp_path / "cache", "--each-user", "memory=2MiB") as daemon:
        assert daemon.describe().free_bytes == 2 << 20
        with (
            edge.Cluster.connect([daemon.address]) as cluster,
            pytest.raises(CapacityError),
        ):
            cluster.load(tiny_checkpoint("llama").path, dtype="float32", stream="off")


def test_limits_that_are_none_are_refused(tmp_path: Path) -> None:
    for option, value, remedy in (
        ("--each-user", "cups=2", "write for example memory=4GiB"),
        ("--allow", "use=kitchen", "write use=ID"),
        ("--audit", tmp_path / "no" / "file", "No such file"),
    ):
        assert remedy in edge_command("peer", "--no-announce", option, value).sentence()


def _shards(daemon: Daemon) -> list[str]:
    return [path.name for path in daemon.shards.iterdir() if path.is_dir() and path.name[0] != "."]
