"""What users see of the planner, with real daemons: measured facts, predictions, drift."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import edge
from edge.host.cache_paths import cache_root
from edge.partition import Plan
from edge.planning import drift
from edge.planning.link_profile import LinkFacts
from edge.planning.measured_proposal import forget_measured
from edge.planning.profile_cache import FactsCache
from edge.protocol.measurements import LinkTimes, PeerProfile
from edge.weights.formats import Dtype
from tests.support.checkpoints import TinyCheckpoint
from tests.support.formats import uniform_format
from tests.support.processes import Daemon, start_together
from tests.support.processes import edge as run_edge

DTYPE: Dtype = "int8"
"""Not what other files load, so that what they measured is not known here."""

FASTER = 10_000

LITTLE = ("--model-memory", "16MiB")
"""Enough for the model, and measured with less of it: in half the time."""


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    folder = tmp_path_factory.mktemp("pair")
    with start_together(
        *(
            lambda name=name: Daemon(folder / name, "--no-announce", "--name", name, *LITTLE)
            for name in ("left", "right")
        )
    ) as pair:
        yield pair
        for daemon in pair:
            daemon.await_free()
            assert daemon.messages == ""


@pytest.fixture
def remembered(tmp_path: Path) -> Iterator[None]:
    """What was measured before the test is known again after it."""
    known, kept = cache_root() / "measured", tmp_path / "kept"
    if known.exists():
        shutil.copytree(known, kept)
    yield
    if kept.exists():
        shutil.rmtree(known)
        shutil.copytree(kept, known)


@pytest.fixture(scope="module")
def peers(daemons: list[Daemon]) -> list[str]:
    return [option for daemon in daemons for option in ("--peer", daemon.address)]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def test_the_whole_story_of_a_plan_as_json(
    checkpoint: TinyCheckpoint, peers: list[str], tmp_path: Path
) -> None:
    outcome = run_edge("plan", checkpoint.path, "--dtype", DTYPE, "--explain", "--json", *peers)
    assert (outcome.code, outcome.err) == (0, "")
    value = json.loads(outcome.out)
    used = {row["name"] for row in value["devices"]}
    left = {each["name"] for each in value["left_out"]}
    assert used | left == {"left", "right"}
    assert not used & left
    assert all(each["reason"] for each in value["left_out"])
    assert value["predicted"]["first_token_s"] > 0
    assert value["solo"]["name"] in ("left", "right")
    terms_s = sum(term["seconds"] for term in value["terms"])
    assert value["predicted"]["tokens_per_s"] == pytest.approx(1 / terms_s)
    assert value["predicted"]["bottleneck"]
    assert value["runners_up"]
    for each in value["runners_up"]:
        assert "layers 0-" in each["words"]
        assert each["predicted"]["tokens_per_s"] > 0
        assert Plan.from_json(each["plan"]) != Plan.from_json(value["plan"])

    file = tmp_path / "plan.json"
    file.write_text(outcome.out)
    reply = run_edge(
        "run", checkpoint.path, "-p", "hi", "-n", 5, "--json", "--dtype", DTYPE,
        "--plan", file, *peers,
    )  # fmt: skip
    figures = json.loads(reply.out)["statistics"]
    assert figures["predicted_tokens_per_s"] > 0
    assert figures["predicted_first_token_s"] > 0


def test_a_run_shows_what_was_predicted_beside_what_came(
    checkpoint: TinyCheckpoint, peers: list[str]
) -> None:
    run_edge("plan", checkpoint.path, "--dtype", DTYPE, *peers)
    outcome = run_edge(
        "run", checkpoint.path, "-p", "hi", "-n", 9, "--dtype", DTYPE, "--parallel", "pipeline",
        "--explain", *peers,
    )  # fmt: skip
    assert outcome.code == 0
    for line in ("predicted, ms", "compute left", "compute right", "hops and step", "first token"):
        assert line in outcome.err
    for row in ("token", "the first token"):
        cells = next(
            [cell.strip() for cell in line.split("│")[1:-1]]
            for line in outcome.err.splitlines()
            if line.startswith("│") and line.split("│")[1].strip() == row
        )
        assert all(float(cell) > 0 for cell in cells[1:])


def test_the_same_for_people(checkpoint: TinyCheckpoint, peers: list[str]) -> None:
    out = run_edge(
        "plan", checkpoint.path, "--dtype", DTYPE, "--parallel", "tensor", "--explain",
        "--prompt-tokens", 30, "--output-tokens", 20, *peers,
    ).out  # fmt: skip
    assert "Predicted for 30 tokens of prompt and 20 of answer: first token after " in out
    assert "Most of a token's time: " in out
    assert "The best single device, " in out
    assert "reduce" in out
    out = run_edge("plan", checkpoint.path, "--dtype", DTYPE, "--explain", *peers).out
    assert "the next best plans" in out
    assert "layers 0-" in out


def test_the_plan_chosen_is_never_predicted_to_be_slower_than_one_device(
    checkpoint: TinyCheckpoint, daemons: list[Daemon]
) -> None:
    with edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster:
        workload = edge.Workload(prompt_tokens=20, output_tokens=30)
        with cluster.load(checkpoint.path, dtype=DTYPE, plan="auto", workload=workload) as model:
            choice = model.proposal.choice
            assert choice.predicted is not None
            assert choice.solo is not None
            assert choice.predicted.total_s(workload) <= choice.solo.estimate.total_s(workload)
            assert model.proposal.workload.context_tokens == 50
            assert model.proposal.workload.cached_tokens == model.context_tokens


def test_each_reply_is_told_with_the_prediction_for_its_own_lengths(
    checkpoint: TinyCheckpoint, daemons: list[Daemon]
) -> None:
    with (
        edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster,
        cluster.load(checkpoint.path, dtype=DTYPE, plan="tensor") as model,
    ):
        for prompt_tokens, new_tokens in ((3, 5), (40, 9)):
            prompt = checkpoint.prompt(prompt_tokens)
            reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
            predicted = model.predict(prompt_tokens=prompt_tokens, output_tokens=new_tokens)
            assert predicted is not None
            figures = reply.statistics
            assert figures["predicted_first_token_s"] == predicted.first_token_s
            assert figures["predicted_tokens_per_s"] == predicted.tokens_per_s
            assert figures["decode_s"] > 0
            assert (figures["tokens_per_s"] is None) == (new_tokens < 8)
        (first, second) = model.measure()
        assert (first.prompt.steps, first.decode.steps) == (2, 4 + 8)
        assert (second.prompt.steps, second.decode.steps) == (2, 4 + 8)


@pytest.mark.usefixtures("remembered")
def test_loading_onto_one_device_does_not_wait_for_a_measurement(
    checkpoint: TinyCheckpoint, daemons: list[Daemon]
) -> None:
    phases: set[str] = set()
    with edge.Cluster.connect([daemons[0].address]) as cluster:
        forget_measured(cluster.peers)

        def load() -> edge.Model:
            return cluster.load(
                checkpoint.path, dtype=DTYPE, progress=lambda event: phases.add(event.phase)
            )

        with load() as model:
            reply = model.generate([1, 2, 3], max_new_tokens=2)
            assert "predicted_tokens_per_s" not in reply.statistics
            assert model.predict(prompt_tokens=3, output_tokens=2) is None
            assert model.check() is None
        proposal = cluster.propose(checkpoint.path, dtype=DTYPE)
        assert proposal.choice.predicted is not None
        with load() as model:
            reply = model.generate([1, 2, 3], max_new_tokens=2)
            assert reply.statistics["predicted_tokens_per_s"] > 0
    assert "load" in phases
    assert "measure" not in phases


def test_what_would_change(checkpoint: TinyCheckpoint, peers: list[str]) -> None:
    command = ("plan", checkpoint.path, "--dtype", DTYPE, "--parallel", "tensor", *peers)
    value = json.loads(run_edge(*command, "--json", "--what-if", "without right").out)
    assert value["changes"] == ["without right"]
    assert [row["name"] for row in value["devices"]] == ["left"]
    slow = json.loads(run_edge(*command, "--json", "--what-if", "link left-right 100ms 1Mbit").out)
    assert slow["predicted"]["tokens_per_s"] < 10
    # 102 ms, and what two peers of one host take from each other: measured on a busy machine that
    # may come out some ms below nothing.
    each_ms = re.search(
        r"the link left-right: 9 sums x ([\d.]+) ms", slow["predicted"]["bottleneck"]
    )
    assert each_ms is not None
    assert float(each_ms[1]) > 50
    shown = run_edge(*command, "--what-if", "link left-right 100ms 1Mbit")
    assert "Without the changes: first token after " in shown.out
    sentence = run_edge(*command, "--what-if", "without nobody").sentence()
    assert sentence == "There is no device 'nobody' in the cluster; there are left, right."


def test_a_benchmark_shows_what_was_predicted(
    checkpoint: TinyCheckpoint, peers: list[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    command = (
        "bench", checkpoint.path, "--dtype", DTYPE, "--parallel", "tensor", "--repeats", 1,
        "--prompt-tokens", 8, "--new-tokens", 8, "--requests", 2, *peers,
    )  # fmt: skip
    assert "predicted" in run_edge(*command).out
    value = json.loads(run_edge(*command, "--json", "--report", report).out)
    assert value["predicted"].keys() == {
        "decode_tokens_per_s", "prefill_tokens_per_s", "first_token_s", "batch_tokens_per_s",
        "decode_tokens_per_s_range", "batch_tokens_per_s_range",
    }  # fmt: skip
    for name, found in value["predicted"].items():
        if not name.endswith("_range"):
            low, high = value["predicted"].get(f"{name}_range", (found, found))
            assert 0 < low <= found <= high
    assert [peer["token"]["steps"] for peer in value["peers"]] == [1, 1]
    line = json.loads(report.read_text())
    assert re.fullmatch(r"[AB] \+ [AB]: layers 0-\d, heads \d:\d", line["plan"])
    assert [each["tokens_per_s"] > 0 for each in (line["said"], line["was"])] == [True, True]
    assert re.match(r"[AB]-[AB]: [125]0* Mbit/s, ", line["links"][0])
    told = report.read_text()
    assert not any(each in told for each in ("left", "right", "127.0.0.1", checkpoint.path.name))


def test_memory_that_is_missing_can_be_tried_out(
    checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    with Daemon(tmp_path, "--no-announce", "--name", "small", "--model-memory", "40KiB") as daemon:
        command = ("plan", checkpoint.path, "--dtype", "float32", "--peer", daemon.address)
        assert "lacks" in run_edge(*command).sentence()
        with_more = run_edge(*command, "--what-if", "+1GiB on small", "--json")
        assert with_more.code == 0
        assert "Without the changes: The model does not fit" in with_more.err
        assert [row["name"] for row in json.loads(with_more.out)["devices"]] == ["small"]


def facts(
    checkpoint: TinyCheckpoint, cluster: edge.Cluster
) -> tuple[list[PeerProfile | None], list[LinkTimes | None]]:
    """What is known of every peer, and of the links between them."""
    cache = FactsCache(cache_root() / "measured")
    format_ = uniform_format(DTYPE)
    return (
        [cache.profile(peer, checkpoint.spec, format_) for peer in cluster.peers],
        [cache.link(one, other) for one, other in permutations(cluster.peers, 2)],
    )


def exaggerate(
    checkpoint: TinyCheckpoint, cluster: edge.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let every peer and link be remembered as ten thousand times as fast as it is.

    Links are believed: on a busy machine a few messages take longer than they did, and the link
    would be measured again.
    """

    async def unchanged(*_: object) -> bool:
        return False

    monkeypatch.setattr(LinkFacts, "_has_changed", unchanged)
    cluster.propose(checkpoint.path, dtype=DTYPE)
    cache, format_ = FactsCache(cache_root() / "measured"), uniform_format(DTYPE)
    for peer in cluster.peers:
        known = cache.profile(peer, checkpoint.spec, format_)
        assert known is not None
        profile = replace(known, rates=known.rates.slowed_by(1 / FASTER))
        cache.keep_profile(peer, checkpoint.spec, format_, profile)
    crowds = cache.crowds(cluster.peers, checkpoint.spec, format_)
    at_no_cost = [replace(each, sum_s=(0.0,) * len(each.rows)) for each in crowds or ()]
    cache.keep_crowds(cluster.peers, checkpoint.spec, format_, at_no_cost)
    for one, other in permutations(cluster.peers, 2):
        times = cache.link(one, other)
        if times is not None:
            quick_link = replace(
                times,
                latency_s=times.latency_s / FASTER,
                there_bytes_per_s=times.there_bytes_per_s * FASTER,
                back_bytes_per_s=times.back_bytes_per_s * FASTER,
            )
            cache.keep_link(one, other, quick_link)


def test_replies_slower_than_predicted_are_told_and_measured_again(
    checkpoint: TinyCheckpoint,
    daemons: list[Daemon],
    peers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which of the facts is to blame is for the measured times to say; what it is, is forgotten.

    And measured again by the next load, or at once.
    """
    monkeypatch.setattr(drift, "LEAST_EXCESS_S", 0.0)
    command = ("run", checkpoint.path, "-p", "hi", "-n", 40, "--dtype", DTYPE, *peers)
    with edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster:
        for options in ((), ("--adapt",)):
            forget_measured(cluster.peers)
            exaggerate(checkpoint, cluster, monkeypatch)
            exaggerated = facts(checkpoint, cluster)
            outcome = run_edge(*command, "--parallel", "pipeline", *options)
            assert outcome.code == 0
            _cut, figures, warning = outcome.err.strip().splitlines()
            assert "tok/s (predicted " in figures
            assert warning.startswith("edge: ")
            assert " times as slow as predicted: " in warning
            now = facts(checkpoint, cluster)
            assert now != exaggerated
            if options:
                assert None not in now[0]


def test_a_conversation_goes_on_with_a_new_plan(
    checkpoint: TinyCheckpoint,
    daemons: list[Daemon],
    peers: list[str],
    talker: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ("chat", talker, "-n", 40, "--dtype", DTYPE, *peers, "--parallel", "pipeline")
    lines = "Hello\n/new\nHello\n/new\nHello\n"
    expected = run_edge(*command, stdin=lines).out
    with edge.Cluster.connect([daemon.address for daemon in daemons]) as cluster:
        exaggerate(checkpoint, cluster, monkeypatch)
        monkeypatch.setattr(drift, "LEAST_EXCESS_S", 0.0)
        outcome = run_edge(*command, "--adapt", stdin=lines)
    assert outcome.code == 0
    assert outcome.out == expected
    assert " times as slow as predicted: " in outcome.err
