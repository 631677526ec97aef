"""A peer that computes wrongly is refused before it gets a part of a model, for that format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import edge
from edge.demos.bundled import MODEL
from tests.support.plans import bundled_plan
from tests.support.processes import Daemon, start_together

PROMPT = [1, 2, 3]

# Names of their own: a device of the same name and setup may have proved its arithmetic before.


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    folder = tmp_path_factory.mktemp("peers")

    def start(name: str, program: str) -> Daemon:
        return Daemon(folder / name, "--no-announce", "--name", name, program=program)

    right = partial(start, "attic", "edge")
    wrong = partial(start, "wrong-cellar", "tests.support.wrong_peer")
    with start_together(right, wrong) as daemons:
        yield daemons


def reply(addresses: list[str], **options: object) -> list[int]:
    with (
        edge.Cluster.connect(addresses) as cluster,
        cluster.load(MODEL, **options) as model,  # type: ignore[arg-type]
    ):
        return list(model.generate(PROMPT, max_new_tokens=8).token_ids)


def test_it_is_left_out_and_its_reply_reaches_nobody(daemons: list[Daemon]) -> None:
    attic, cellar = daemons
    expected = reply([attic.address], dtype="int4", block_size=32)
    found = reply([cellar.address, attic.address], dtype="int4", block_size=32, plan="pipeline")
    assert found == expected
    with edge.Cluster.connect([cellar.address, attic.address]) as cluster:
        proposal = cluster.propose(MODEL, dtype="int4", block_size=32, plan="pipeline")
    said = "wrong-cellar is not used: its back end ort computes wrongly: matmul_nbits in 4 bits"
    assert any(note.startswith(said) for note in proposal.notes)


def test_alone_it_is_refused_by_operator_format_and_distance(daemons: list[Daemon]) -> None:
    _, cellar = daemons
    with pytest.raises(edge.EdgeError, match=r"matmul_nbits .*\(int4\), 1 row, errs by 0\.[01]"):
        reply([cellar.address], dtype="int4", block_size=32)
    assert cellar.await_free().models == ()


def test_it_computes_what_it_computes_rightly(daemons: list[Daemon]) -> None:
    attic, cellar = daemons
    right = reply([attic.address], dtype="int8")
    assert reply([cellar.address], dtype="int8") == right


def test_one_that_becomes_wrong_later_is_replaced(
    daemons: list[Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attic, _ = daemons
    begins = tmp_path / "wrong from now on"
    monkeypatch.setenv("WRONG_FROM", str(begins))
    options = ("--no-announce", "--name", "wrong-shed")
    program = "tests.support.wrong_peer"
    with (
        Daemon(tmp_path / "wrong-shed", *options, program=program) as shed,
        edge.Cluster.connect([attic.address, shed.address]) as cluster,
        cluster.load(
            MODEL,
            dtype="int4",
            block_size=32,
            plan=bundled_plan("pipeline_2", devices=("attic", "wrong-shed")),
            spot_check=1.0,
        ) as model,
    ):
        expected = list(model.generate(PROMPT, max_new_tokens=100).token_ids)
        begins.touch()
        # A check may still be under way when a short answer ends, so there are several.
        while "wrong-shed" in {
            peer.name for peer in cluster.peers if peer.id in model.plan.devices
        }:
            assert list(model.generate(PROMPT, max_new_tokens=100).token_ids) == expected
        assert shed.await_free().models == ()
