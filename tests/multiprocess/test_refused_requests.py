"""Requests that cannot be carried out are refused before anything is computed, with a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.partition import Plan
from edge.partition import PlanError as PartitionPlanError
from edge.weights.integer_formats import DEFAULT_BLOCK_SIZE
from tests.support.checkpoints import TinyCheckpoint
from tests.support.family_sizes import CONTEXT_TOKENS
from tests.support.plans import make_plan
from tests.support.processes import PATIENCE_S, cluster_of_daemons
from tests.support.processes import edge as run_edge

CONTEXT = 64


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edge.Cluster]:
    with cluster_of_daemons(tmp_path_factory.mktemp("daemons"), (), ()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def cut(checkpoint: TinyCheckpoint, layout: str) -> Plan:
    """By hand: so nothing is measured first."""
    return make_plan(
        checkpoint.spec, layout, model=checkpoint.path.name, column_multiple=DEFAULT_BLOCK_SIZE
    )


@pytest.fixture(scope="module")
def model(cluster: edge.Cluster, checkpoint: TinyCheckpoint) -> Iterator[edge.Model]:
    plan = cut(checkpoint, "pipeline_2")
    with cluster.load(checkpoint.path, dtype="float32", plan=plan, context_tokens=CONTEXT) as model:
        yield model


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1] * (CONTEXT + 1), "the prompt has 65 tokens and the context 64; shorten it"),
        ("a" * 100, "the prompt has 100 tokens and the context 64; shorten it"),
        ([1] * CONTEXT, "no room for an answer; shorten it"),
        ([5, 128], "token id 128 is not one of the model's; ids are 0..127"),
        ([-1], "token id -1 is not one of the model's"),
        ([10**5000], "token id an enormous number is not one of the model's"),
        (b"abc", "a prompt must be a text or a sequence of token ids"),
        ({1, 2}, "a prompt must be a text or a sequence of token ids"),
        ({1: 2}, "a prompt must be a text or a sequence of token ids"),
        ([1.5], "whole numbers"),
        (["a", 1], "whole numbers"),
        (None, "whole numbers"),
        ("\ud800", "valid Unicode"),
    ],
    ids=lambda value: str(value) if value != [10**5000] else "enormous",
)
def test_a_prompt_that_cannot_be(model: edge.Model, prompt: Any, message: str) -> None:
    asks: list[Any] = [model.stream]
    if prompt != []:  # which are no prompts to generate
        asks.append(model.generate)
    for ask in asks:
        with pytest.raises(edge.RequestError) as raised:
            ask(prompt)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_new_tokens", 0, "must be 1 or more, not 0"),
        ("max_new_tokens", True, "must be 1 or more, not True"),
        ("temperature", -0.1, "a number of at least 0 and finite, not -0.1"),
        ("temperature", float("nan"), "not nan"),
        ("temperature", "hot", "not 'hot'"),
        ("top_p", 1.5, "at least 0 and at most 1, not 1.5"),
        ("top_k", -1, "a whole number of at least 0"),
        ("min_p", 2, "at least 0 and at most 1"),
        ("min_tokens", -1, "must be 0 or more, not -1"),
        ("min_tokens", 1000, "the answer has room for"),
        ("repetition_penalty", 0, "at least 0.01"),
        ("seed", -1, "seed must be 0 or more"),
        ("stop", "", "not empty"),
        ("stop", [""], "not empty"),
        ("stop", [1], "a text or a list of texts, not [1]"),
        ("stop", None, "a text or a list of texts, not None"),
        ("stop_token_ids", [128], "stop_token_ids has token id 128, which is not one of the"),
        ("stop_token_ids", [-1], "stop_token_ids must be at most 32 token ids, not [-1]"),
        ("stop_token_ids", "a", "stop_token_ids must be at most 32 token ids, not 'a'"),
        ("stop_token_ids", [1] * 33, "stop_token_ids must be at most 32 token ids"),
    ],
)
def test_a_setting_that_cannot_be(
    model: edge.Model, name: str, value: object, message: str
) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(edge.RequestError) as raised:
        model.generate([1], **settings)
    assert message in str(raised.value)


def test_an_answer_ends_at_a_token_that_was_asked_for(
    model: edge.Model, checkpoint: TinyCheckpoint
) -> None:
    prompt = checkpoint.prompt(5)
    expected = checkpoint.greedy(prompt, 8)
    reply = model.generate(prompt, max_new_tokens=8, stop_token_ids=[expected[3], 127])
    assert list(reply.token_ids) == expected[: expected.index(expected[3]) + 1]
    assert reply.finish_reason == "stop"


def test_a_prediction_that_cannot_be(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint, model: edge.Model
) -> None:
    """Of peers that were measured, and not: once, as those that hold a model are not remembered."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt_tokens": -1}, "prompt_tokens must be a whole number from 1 to .*, not -1"),
        ({"prompt_tokens": 4, "output_tokens": -1}, "output_tokens must be .* from 0 to .*, not -"),
        ({"prompt_tokens": 4, "output_tokens": 4, "concurrency": 0}, "concurrency must be .*not 0"),
        ({"prompt_tokens": "5", "output_tokens": 4}, "prompt_tokens must be .*, not '5'"),
        ({"prompt_tokens": None, "output_tokens": 4}, "prompt_tokens must be .*, not None"),
        ({"prompt_tokens": 2.5, "output_tokens": 4}, "prompt_tokens must be .*, not 2.5"),
        ({"prompt_tokens": 10**400, "output_tokens": 4}, "not an enormous number"),
        ({"new_tokens": 4}, "there are prompt_tokens, output_tokens, concurrency"),
    ]
    with cluster.load(checkpoint.path, plan="tensor") as measured:
        assert measured.predict() == measured.predict(prompt_tokens=512, output_tokens=128)
        assert measured.predict(prompt_tokens=5) is not None
        assert model.predict(prompt_tokens=5) is None
        for each in (measured, model):
            for sizes, message in wrong:
                with pytest.raises(edge.RequestError, match=message):
                    each.predict(**sizes)


@pytest.mark.parametrize(
    "path",
    ["a\0b", 5, None, b"folder", "~nobody-of-this-name/x", pytest.param(10**5000, id="enormous")],
    ids=str,
)
def test_what_is_no_path(cluster: edge.Cluster, path: Any) -> None:
    for ask in (cluster.load, cluster.propose):
        with pytest.raises(edge.RequestError, match="is not a path"):
            ask(path)


def test_every_call_says_the_same_of_a_closed_model(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint
) -> None:
    model = cluster.load(checkpoint.path, plan=cut(checkpoint, "tensor_2"))
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: model.generate([1]),
        lambda: model.stream([1]),
        lambda: model.logits([1]),
        model.measure,
        model.check,
    ]
    for use in uses:
        with pytest.raises(edge.RequestError) as raised:
            use()
        assert str(raised.value) == "the model is closed; load it again"


def test_a_stream_is_for_one_thread_at_a_time(model: edge.Model) -> None:
    """Others are told so; they do not wait for a token that never comes."""
    stream = model.stream([1], max_new_tokens=CONTEXT - 1, ignore_eos=True)
    together = threading.Barrier(3)

    def read() -> list[str]:
        together.wait()
        try:
            return [str(token.token_id) for token in stream]
        except edge.RequestError as error:
            return [str(error)]

    with ThreadPoolExecutor(3) as pool:
        found = [future.result() for future in [pool.submit(read) for _ in range(3)]]
    told = [each for each in found if each and "another thread reads" in each[-1]]
    assert len(told) < 3, "one of them reads to the end"
    assert len(stream.reply().token_ids) == CONTEXT - 1


FORKED = """
import multiprocessing, sys, warnings
import edge

warnings.simplefilter("ignore")

def child(model, stream, cluster):
    for use in (lambda: model.generate([1]), lambda: next(stream), lambda: cluster.load("x")):
        try:
            use()
        except edge.RequestError as error:
            print(error, flush=True)
    cluster.close()

with edge.Cluster.local(1, threads=1) as cluster, cluster.load(sys.argv[1]) as model:
    stream = model.stream([1], max_new_tokens=3, ignore_eos=True)
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(model, stream, cluster)
    )
    process.start()
    process.join()
    print(process.exitcode, len(list(stream)), len(model.generate([1], max_new_tokens=2).token_ids))
"""


def test_a_forked_child_is_told_that_the_cluster_is_its_parents(
    checkpoint: TinyCheckpoint,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, checkpoint.path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    *told, last = done.stdout.splitlines()
    assert len(told) == 3
    assert all("before this process was forked" in line for line in told)
    assert last == "0 3 2", "the parent goes on"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("client", [3], "client must be a text, not [3]"),
        ("cache_salt", None, "cache_salt must be a text, not None"),
        ("id", 5, "id must be a text or None, not 5"),
        ("id", "\ud800", "id must be a text of at most 256 printable characters, not '\\ud800'"),
        ("id", "x" * 2000, "id must be a text of at most 256 printable characters, not 'xxx"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_who_asks_must_be_a_text(
    model: edge.Model, checkpoint: TinyCheckpoint, name: str, value: Any, message: str
) -> None:
    """Else it would hang, or end the model for everybody."""
    with pytest.raises(edge.RequestError) as raised:
        model.stream([1], max_new_tokens=1, **{name: value})
    assert message in str(raised.value)
    prompt = checkpoint.prompt(5)
    assert list(model.generate(prompt, max_new_tokens=2).token_ids) == checkpoint.greedy(prompt, 2)


def test_logits_of_a_prompt_that_cannot_be(model: edge.Model) -> None:
    for prompt in ([], [1] * (CONTEXT + 1), [128], "x" * (CONTEXT + 1)):
        with pytest.raises(edge.RequestError):
            model.logits(prompt)
    assert model.logits([1] * CONTEXT).shape == (CONTEXT, 128)


def test_what_was_refused_leaves_nothing_behind(
    model: edge.Model, checkpoint: TinyCheckpoint
) -> None:
    prompt = checkpoint.prompt(5)
    for _ in range(3):
        with pytest.raises(edge.RequestError):
            model.generate(prompt, max_new_tokens=-1)
    assert list(model.generate(prompt, max_new_tokens=8).token_ids) == checkpoint.greedy(prompt, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp4"}, "dtype 'fp4' is not one of auto, float32, int8, int4, int4-pure"),
        ({"block_size": 17}, "block size 17 is not one of (16, 32, 64, 128)"),
        ({"accuracy": "exact"}, "accuracy 'exact' is not one of fast, high"),
        (
            {"plan": "ring"},
            "plan must be 'auto', 'pipeline' or 'tensor', or an edge.Plan, not 'ring'",
        ),
        ({"batch_invariant": "no"}, "batch_invariant must be True or False, not 'no'"),
        ({"context_tokens": 0}, "context_tokens must be 1 or more, not 0"),
        ({"context_tokens": CONTEXT_TOKENS + 1}, f"1 to {CONTEXT_TOKENS} for this model"),
    ],
    ids=str,
)
def test_a_load_that_cannot_be(
    cluster: edge.Cluster,
    checkpoint: TinyCheckpoint,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Measuring takes seconds: whoever asks for what cannot be does not wait for it.
    monkeypatch.delattr("edge.planning.measured_proposal.measured_cluster")
    for ask in (cluster.load, cluster.propose):
        with pytest.raises(edge.RequestError) as raised:
            ask(checkpoint.path, **options)
        assert message in str(raised.value)


def broken_plan(checkpoint: TinyCheckpoint) -> dict[str, Any]:
    plan: dict[str, Any] = cut(checkpoint, "pipeline_2").to_json()
    plan["stages"][0]["layers"] = [0, 2]
    plan["stages"][0]["shards"][0]["device"] = "nobody"
    plan["stages"][0]["shards"][0]["heads"] = [0, 7]
    plan["stages"][1]["layers"] = [3, 4]
    return plan


def test_a_plan_by_hand_is_refused_with_everything_that_is_wrong(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    plan = broken_plan(checkpoint)
    wrong = ("layers from 3, where 2 would be next", "'nobody'", "heads")
    with pytest.raises(edge.PlanError) as raised:
        cluster.load(checkpoint.path, plan=Plan.from_json(plan))
    assert len(raised.value.problems) >= len(wrong)
    for each in wrong:
        assert any(each in problem for problem in raised.value.problems)
        assert each in str(raised.value)

    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    peers = peer_options(cluster)
    sentence = run_edge("run", checkpoint.path, "-p", "x", "--plan", file, *peers).sentence()
    assert all(each in sentence for each in wrong)

    for shard in plan["stages"][0]["shards"] + plan["stages"][1]["shards"]:
        shard["ffn_columns"], shard["vocab"] = [5, 2], [9, 3]
    plan["stages"] *= 3
    file.write_text(json.dumps(plan))
    with pytest.raises(PartitionPlanError) as unread:
        Plan.from_json(plan)
    assert len(unread.value.problems) == 12
    sentence = run_edge("plan", checkpoint.path, "--plan", file, *peers).sentence()
    assert all(problem.rstrip(".") in sentence for problem in unread.value.problems)


def test_a_plan_with_names_of_peers_runs(cluster: edge.Cluster, checkpoint: TinyCheckpoint) -> None:
    plan: Any = cut(checkpoint, "tensor_2").to_json()
    for shard, name in zip(plan["stages"][0]["shards"], ("local-2", "local-1"), strict=True):
        shard["device"] = name
    with cluster.load(checkpoint.path, dtype="float32", plan=Plan.from_json(plan)) as model:
        names = [model.peers[device].name for device in model.plan.devices]
        assert names == ["local-2", "local-1"]
        prompt = checkpoint.prompt(4)
        reply = model.generate(prompt, max_new_tokens=4)
        assert list(reply.token_ids) == checkpoint.greedy(prompt, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "must be an object"),
        (b'{"plan": {"stages": 3}}', "lacks the field 'version'"),
        (b'{"plan": null}', "must be an object"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
def test_a_plan_file_that_is_garbage(
    cluster: edge.Cluster,
    checkpoint: TinyCheckpoint,
    tmp_path: Path,
    content: bytes,
    message: str,
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    sentence = run_edge(
        "run", checkpoint.path, "-p", "x", "--plan", file, *peer_options(cluster)
    ).sentence()
    assert str(file) in sentence
    assert message in sentence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "100000"], f"context_tokens must be 1 to {CONTEXT_TOKENS}"),
        (["-p", ""], "the prompt is empty"),
    ],
    ids=str,
)
def test_the_command_line_says_the_same(
    cluster: edge.Cluster, checkpoint: TinyCheckpoint, options: Sequence[str], message: str
) -> None:
    one_peer = peer_options(cluster)[:2]
    outcome = run_edge("run", checkpoint.path, "-p", "x", *options, *one_peer)
    assert message in outcome.sentence()


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("chat",)], ids=lambda each: each[0])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature must be a number of at least 0"),
        (["--top-p", "7"], "top_p must be"),
        (["--stop", ""], "stop strings must be texts that are not empty"),
    ],
    ids=str,
)
def test_what_no_model_can_do_is_refused_before_anyone_is_looked_for(
    checkpoint: TinyCheckpoint, command: tuple[str, ...], options: list[str], message: str
) -> None:
    outcome = run_edge(command[0], checkpoint.path, *command[1:], *options, "--peer", "none:1")
    assert message in outcome.sentence()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "x"], "Missing option '-p'"),
        (["run", "x", "-p", "y", "-n", "0"], "'-n'"),
        (["run", "x", "-p", "y", "--dtype", "fp4"], "'fp4' is not one of"),
        (["run", "x", "-p", "y", "--parallel", "ring"], "'ring' is not one of"),
        (["run", "x", "-p", "y", "--local", "0"], "'--local'"),
        (["run", "x", "-p", "y", "--local", "1", "--peer", "a:1"], "either --local or --peer"),
        (["run", "x", "-p", "y", "--memory", "1GiB"], "are for --local peers"),
        (["run", "x", "-p", "y", "--plan", "/none"], "does not exist"),
        (["plan"], "Missing argument 'MODEL'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["peer", "--threads", "0"], "'--threads'"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    outcome = run_edge(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def peer_options(cluster: edge.Cluster) -> list[str]:
    return [part for peer in cluster.peers for part in ("--peer", peer.address)]
