"""A draft model changes the number of steps, and no token; apart, and beside the model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.demos.bundled import MODEL
from edge.partition import Plan
from tests.support.plans import bundled_plan

PROMPT = "Where does the cat live?"
SAMPLED = {"temperature": 0.3, "seed": 3}


@pytest.fixture(scope="module")
def two_peers() -> Iterator[edge.Cluster]:
    with edge.Cluster.local(peers=2) as cluster:
        yield cluster


def on_first(cluster: edge.Cluster) -> Plan:
    return bundled_plan("solo", devices=[cluster.peers[0].name])


def reply(model: edge.Model, **options: Any) -> edge.Reply:
    return model.generate(PROMPT, max_new_tokens=100, ignore_eos=True, **options)


def check_guesses(model: edge.Model, plain: edge.Reply, **sampling: Any) -> None:
    """How many tokens are guessed at once depends on the time of steps, so there are some tries."""
    best, wanted = 0.0, 1.2
    for _try in range(8):
        guessed = reply(model, **sampling)
        assert guessed.token_ids == plain.token_ids
        best = max(best, guessed.statistics["tokens_per_pass"])
        if best > wanted:
            break
    assert best > wanted


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_without_guesses(
    two_peers: edge.Cluster, sampling: dict[str, Any]
) -> None:
    second = two_peers.peers[1].name
    plan = on_first(two_peers)
    with two_peers.load(MODEL, dtype="float32", plan=plan, draft=MODEL) as model:
        assert model.drafts_on == second
        assert any(f"drafts on {second}" in note for note in model.proposal.notes)
        plain = reply(model, speculate="off", **sampling)
        check_guesses(model, plain, **sampling)
        check_guesses(model, plain, speculate="draft", **sampling)
    with two_peers.load(MODEL, dtype="float32", plan=plan) as model:
        assert model.drafts_on is None
        with pytest.raises(edge.RequestError, match="needs a draft model"):
            reply(model, speculate="draft")


def test_the_only_device_drafts_for_itself() -> None:
    with (
        edge.Cluster.local(peers=1) as cluster,
        cluster.load(MODEL, dtype="float32", draft=MODEL) as model,
    ):
        assert model.drafts_on == cluster.peers[0].name
        plain = reply(model, speculate="off")
        check_guesses(model, plain)


def test_a_lost_drafter_ends_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with edge.Cluster.local(peers=2) as cluster:
        plan = on_first(cluster)
        with cluster.load(MODEL, dtype="float32", plan=plan, draft=MODEL) as model:
            plain = reply(model, speculate="off")
            with model.stream(PROMPT, max_new_tokens=100, ignore_eos=True) as stream:
                for number, _token in enumerate(stream):
                    if number == 20:
                        assert model.drafts_on == cluster.peers[1].name
                        cluster._daemons._processes[1].kill()  # type: ignore[union-attr]
                guessed = stream.reply()
            assert guessed.token_ids == plain.token_ids
            assert guessed.statistics["accepted_tokens"] > 5
            assert reply(model).token_ids == plain.token_ids
            assert model.drafts_on is None
            assert "the draft model is lost" in caplog.text


def test_another_vocabulary_is_refused(two_peers: edge.Cluster, tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "other")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][-1], "id": 4000, "content": "<other>"}
    )
    file.write_text(json.dumps(tokenizer), "utf-8")
    for ask in (two_peers.load, two_peers.propose):
        with pytest.raises(edge.RequestError, match="another vocabulary than"):
            ask(MODEL, draft=folder)


def until_it_drafts(model: edge.Model) -> None:
    ends_s = time.monotonic() + 20
    while model.drafts_on is None:
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def test_after_a_loss_it_drafts_beside_the_new_plan() -> None:
    with edge.Cluster.local(peers=3) as cluster:
        names = [peer.name for peer in cluster.peers]
        plan = bundled_plan("pipeline_2", devices=names[:2])
        with cluster.load(MODEL, dtype="float32", plan=plan, draft=MODEL) as model:
            assert model.drafts_on == names[2]
            plain = reply(model, speculate="off")
            with model.stream(PROMPT, max_new_tokens=100, ignore_eos=True) as stream:
                for number, _token in enumerate(stream):
                    if number == 20:
                        cluster._daemons._processes[1].kill()  # type: ignore[union-attr]
                guessed = stream.reply()
            assert guessed.token_ids == plain.token_ids
            assert len(model.recoveries) == 1
            until_it_drafts(model)
            check_guesses(model, plain)
