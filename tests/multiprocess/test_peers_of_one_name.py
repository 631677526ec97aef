"""Two daemons that call themselves alike: they are told apart wherever they are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import edge
from edge.cli.reply_view import tell_recoveries
from edge.partition import Plan
from edge.progress import Progress
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon, start_together
from tests.support.processes import edge as run_edge


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Daemon]]:
    options = ("--no-announce", "--name", "vm")
    with start_together(
        *(partial(Daemon, tmp_path / str(number), *options) for number in range(2))
    ) as daemons:
        yield daemons


def test_two_devices_of_one_name(
    tiny_checkpoint: Callable[..., TinyCheckpoint], daemons: list[Daemon]
) -> None:
    path = tiny_checkpoint("llama").path
    peers = [option for daemon in daemons for option in ("--peer", daemon.address)]
    told = {each["name"]: each for each in json.loads(run_edge("peers", "--json", *peers).out)}
    assert sorted(told) == ["vm", "vm-2"]
    ids = [each["id"] for each in told.values()]
    again = json.loads(run_edge("peers", "--json", *peers[2:], *peers[:2]).out)
    assert {each["name"]: each["id"] for each in again} == {
        name: each["id"] for name, each in told.items()
    }, "whatever the order"

    plan = run_edge("plan", path, "--parallel", "pipeline", "--explain", *peers)
    assert plan.code == 0, plan.err
    assert "vm-2" in plan.out
    assert not any(id[:8] in plan.out + plan.err for id in ids)
    without = run_edge("plan", path, "--what-if", "without vm-2", "--json", *peers)
    assert json.loads(without.out)["plan"]["stages"][0]["shards"][0]["device"] == told["vm"]["id"]
    refused = run_edge("plan", path, "--what-if", "without vm-3", *peers)
    listed = refused.sentence().rpartition("there are ")[2].rstrip(".")
    assert sorted(listed.split(", ")) == ["vm", "vm-2"]

    first = json.loads(run_edge("plan", path, "--parallel", "pipeline", "--json", *peers).out)
    for stage, name in zip(first["plan"]["stages"], ("vm-2", "vm"), strict=True):
        stage["shards"][0]["device"] = name
    told_of: set[str] = set()

    def on_progress(event: Progress) -> None:
        told_of.add(event.peer)

    by_hand = Plan.from_json(first["plan"])
    with edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster:
        with cluster.load(path, plan=by_hand, progress=on_progress) as model:
            assert model.plan.devices == (told["vm-2"]["id"], told["vm"]["id"])
            assert len(model.generate("hi", max_new_tokens=2).token_ids) == 2
        assert told_of >= {"vm", "vm-2"}
        lost = next(each for each in daemons if each.address == told["vm"]["address"])
        lost.kill()
        with cluster.load(path) as model:
            assert model.plan.devices == (told["vm-2"]["id"],)
            assert [row.name for row in model.proposal.rows] == ["vm-2"], "the same as before"


def test_the_one_that_is_lost_is_named(
    tiny_checkpoint: Callable[..., TinyCheckpoint], daemons: list[Daemon]
) -> None:
    path = tiny_checkpoint("llama").path
    with (
        edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster,
        cluster.load(path, plan="pipeline") as model,
    ):
        (second,) = (peer for peer in cluster.peers if peer.name == "vm-2")
        next(each for each in daemons if each.address == second.address).kill()
        assert len(model.generate("hi", max_new_tokens=4).token_ids) == 4
        assert ["vm-2" in recovery.reason for recovery in model.recoveries] == [True]


def test_what_is_told_of_losses_has_no_ids(
    tiny_checkpoint: Callable[..., TinyCheckpoint],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also of a device that computed between two of them, and has gone since."""
    path = tiny_checkpoint("llama").path
    starts = [
        partial(Daemon, tmp_path / name, "--no-announce", "--name", name)
        for name in ("attic", "barn", "cellar")
    ]
    with (
        start_together(*starts) as three,
        edge.Cluster.connect([daemon.address for daemon in three]) as cluster,
        cluster.load(path, plan="pipeline") as model,
    ):
        for lost in three[:2]:
            lost.kill()
            assert len(model.generate("hi", max_new_tokens=4).token_ids) == 4
        capsys.readouterr()
        tell_recoveries(model, model.recoveries)
        told = capsys.readouterr().err
        assert len(model.recoveries) == 2
        assert "the answer continued on" in told
        assert not any(peer.id[:8] in told for peer in cluster.peers), told
