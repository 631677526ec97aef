"""What requests leave in memory is not computed again, and no token is another for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.cli.chat.conversation import Conversation
from edge.cli.chat.settings import Settings
from edge.cli.chat.talk import TerminalTalk
from edge.demos.bundled import MODEL
from edge.host.state_paths import STATE_VARIABLE
from edge.partition import Parallel, Plan
from edge.weights.formats import Dtype
from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import Daemon, Outcome
from tests.support.processes import edge as edge_command
from tests.support.replies import EndlessReplies
from tests.support.slow_cases import repeats_are_slow, shown_in_parts

CONTEXT = 400
CHUNK = 256
"""Tokens of a step."""

Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and its answer."""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny_checkpoint("llama")


def chunks(model: edge.Model) -> list[int]:
    """Steps of prompts that each peer computed since this was last asked."""
    return [times.prompt.steps for times in model.measure()]


OPTIONS = edge.GenerationOptions(
    max_new_tokens=12, temperature=1.5, seed=7, ignore_eos=True, logprobs=3
)


def answer(model: edge.Model, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """By sampling, so that a row that is another in its last bits may be noticed."""
    return model.generate(prompt, OPTIONS).token_ids


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ("pipeline", "int4"),
        *(
            pytest.param(*case, marks=shown_in_parts("multiprocess/test_kept_beginnings.py"))
            for case in (("tensor", "int4"), ("tensor", "float32"))
        ),
    ],
)
def test_a_conversation_is_as_if_each_turn_were_computed_anew(
    checkpoint: TinyCheckpoint, plan: Parallel, dtype: Dtype
) -> None:
    """Where no bit may depend on what is found. Turns that go on from the last, one that goes back,
    and one of another conversation. And as if each were asked by another session, which finds what
    the first has left."""
    said = [tuple(checkpoint.prompt(count)) for count in (40, 5, 30, 17)]
    turns: list[Turn] = []
    with (
        edge.Cluster.local(peers=2, threads=1) as cluster,
        edge.Cluster.local(peers=2, threads=1) as others,
    ):

        def load(cluster: edge.Cluster) -> edge.Model:
            return cluster.load(
                checkpoint.path,
                dtype=dtype,
                plan=plan,
                context_tokens=CONTEXT,
                concurrency=2,
                batch_invariant=True,
            )

        with load(cluster) as model:
            prompt: tuple[int, ...] = ()
            for new in said:
                prompt += new
                reply = answer(model, prompt)
                turns.append((prompt, reply))
                prompt += reply
            back = turns[2][0][:60] + said[1]
            turns.append((back, answer(model, back)))
            other = said[3][::-1] * 2
            turns.append((other, answer(model, other)))
        longest = max(turns[:-1], key=lambda turn: len(turn[0]))
        for peers, asked in ((cluster, turns), (others, [longest, turns[-1]])):
            for prompt, reply in asked:
                with load(peers) as model:
                    assert answer(model, prompt) == reply


def test_many_who_take_turns_find_what_was_said(checkpoint: TinyCheckpoint) -> None:
    """As far as memory goes: each comes again when all others were there."""
    prompts = [(number + 3, *checkpoint.prompt(20)) for number in range(24)]
    options = edge.GenerationOptions(max_new_tokens=2, temperature=0, ignore_eos=True)
    with (
        edge.Cluster.local(peers=1, threads=1) as cluster,
        cluster.load(checkpoint.path, context_tokens=CONTEXT, concurrency=16) as model,
    ):
        replies = [model.generate(prompt, options) for prompt in prompts]
        for prompt, reply in zip(prompts, replies, strict=True):
            later = model.generate((*prompt, *reply.token_ids, 5, 6), options)
            assert later.statistics["found_tokens"] == len(prompt) + 1


@pytest.mark.parametrize(
    ("plan", "dtype"),
    repeats_are_slow([("pipeline", "float32"), ("tensor", "int4"), ("tensor", "float32")]),
)
def test_a_turn_is_what_it_is_in_the_same_steps(
    plan: Parallel,
    dtype: Dtype,
    checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third one of a conversation goes on on other peers, which know nothing of the first two.
    What was said is not computed again, and to the last bit it is what a plan computes that is told
    how it was computed. And another session finds it."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    said = [tuple(checkpoint.prompt(count)) for count in (41, 6, 31)]
    with (
        edge.Cluster.local(peers=2, threads=1) as cluster,
        edge.Cluster.local(peers=2, threads=1) as others,
    ):

        def load(cluster: edge.Cluster, plan: Plan | Parallel) -> edge.Model:
            return cluster.load(
                checkpoint.path, dtype=dtype, plan=plan, context_tokens=CONTEXT, concurrency=2
            )

        with load(cluster, plan) as model:
            prompt, found = said[0], []
            for new in said[1:]:
                reply = model.generate(prompt, OPTIONS)
                found.append(reply.statistics["found_tokens"])
                prompt += (*reply.token_ids, *new)
            with model.stream(prompt, OPTIONS, journal=True) as stream:
                for _number in range(5):
                    next(stream)
            whole = model.generate(prompt, OPTIONS)
            assert found == [0, len(said[0]) + len(reply.token_ids) - 1], "the answer as well"
            used = model.plan
        with (
            edge.KeptReply.open() as kept,
            others.load(kept.model, kept.options, resumes=kept) as model,
        ):
            assert len(kept.journal.content.singly) == 2
            resumed = model.resume(kept)
        assert resumed.token_ids == whole.token_ids
        assert (resumed.logprobs, resumed.top_logprobs) == (whole.logprobs, whole.top_logprobs)
        with load(cluster, used) as model:
            asked = (*prompt, *whole.token_ids, *said[1])
            there = len(asked) - len(said[1]) - 1
            again = model.generate(asked, OPTIONS)
            assert again.statistics["found_tokens"] == there // 16 * 16


def test_only_what_is_new_is_computed(checkpoint: TinyCheckpoint) -> None:
    prompt = tuple(checkpoint.prompt(300))
    with (
        edge.Cluster.local(peers=2, threads=1) as cluster,
        cluster.load(
            checkpoint.path, dtype="float32", plan="tensor", context_tokens=CONTEXT, concurrency=2
        ) as model,
    ):
        first = answer(model, prompt)
        assert chunks(model) == [2, 2]
        answer(model, (*prompt, *first, *prompt[:30]))
        assert chunks(model) == [1, 1]
        answer(model, (*prompt[:280], *prompt[:60]))
        assert chunks(model) == [1, 1]
        assert answer(model, prompt) == first
        assert chunks(model) == [1, 1]
        assert model.logits(prompt).shape[0] == len(prompt), "every row is wanted"
        assert chunks(model) == [2, 2]


def test_requests_that_begin_alike_compute_their_beginning_once(
    checkpoint: TinyCheckpoint,
) -> None:
    """Also where they come at the same time, and where a prompt of one token goes first."""
    beginning = checkpoint.prompt(CHUNK + 40)
    prompts = [[*beginning, *checkpoint.prompt(10 + number)] for number in range(6)]
    with (
        edge.Cluster.local(peers=2, threads=1) as cluster,
        cluster.load(
            checkpoint.path, dtype="float32", plan="pipeline", context_tokens=CONTEXT, concurrency=3
        ) as model,
    ):
        model.generate(prompts[0][:1], max_new_tokens=1)
        chunks(model)
        replies = model.generate(prompts, max_new_tokens=1)
        # The first takes two; each of the others what comes after its beginning.
        assert chunks(model) == [2 + 5, 2 + 5]
        for prompt, reply in zip(prompts, replies, strict=True):
            assert list(reply.token_ids) == checkpoint.greedy(prompt, 1)


def test_a_long_beginning_of_many_requests_is_little_more_work_than_once(tmp_path: Path) -> None:
    """By what the coordinator gave out, and by what each peer computed."""
    folder = Path(shutil.copytree(MODEL, tmp_path / MODEL.name))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1100}))
    random = np.random.default_rng(5)
    beginning, *tails = (
        [int(token) for token in random.integers(3, config["vocab_size"], size=size)]
        for size in (1000, *[20] * 16)
    )
    whole_tokens = len(beginning) + sum(map(len, tails))
    plans: tuple[Parallel, ...] = ("pipeline", "tensor")
    for plan in plans:
        with (
            edge.Cluster.local(peers=2, threads=1) as cluster,
            cluster.load(
                folder, dtype="float32", plan=plan, context_tokens=1100, concurrency=4
            ) as model,
        ):
            model.generate([[*beginning, *tail] for tail in tails], max_new_tokens=1)
            assert whole_tokens <= model.work.prompt_tokens <= 1.1 * whole_tokens
            steps = 1000 // CHUNK + 1 + len(tails) - 1
            assert chunks(model) == [steps, steps]


def test_a_prompt_that_is_read_beside_an_answer_is_the_same_prompt(
    checkpoint: TinyCheckpoint,
) -> None:
    """It is cut otherwise, and no bit of its answer is another; so what is kept of it may be."""
    prompt = checkpoint.prompt(301)
    options = edge.GenerationOptions(max_new_tokens=3, ignore_eos=True, logprobs=5)
    told: list[list[object]] = []
    with (
        edge.Cluster.local(peers=2, threads=1) as cluster,
        edge.Cluster.local(peers=2, threads=1) as others,
    ):

        def load(cluster: edge.Cluster, plan: Plan | Parallel = "tensor") -> edge.Model:
            return cluster.load(
                checkpoint.path,
                dtype="int4",
                plan=plan,
                context_tokens=CONTEXT,
                concurrency=2,
                batch_invariant=True,
            )

        def ask(model: edge.Model) -> None:
            with model.stream(prompt, options) as stream:
                told.append([(token.logprob, token.top_logprobs) for token in stream])

        with load(cluster) as model:
            stream = model.stream(checkpoint.prompt(20)[::-1], max_new_tokens=370, ignore_eos=True)
            with EndlessReplies([stream]) as reading:
                reading.await_more()
                chunks(model)
                ask(model)
                assert min(chunks(model)) > 2
            ask(model)
            assert chunks(model) == [1, 1], "it was kept"
            plan = model.plan  # measured anew, the peers may be given other parts
        for peers, again, steps in ((cluster, plan, 1), (others, None, 2)):
            with load(peers, again or "tensor") as model:
                ask(model)
                assert chunks(model) == [steps, steps]
    assert told[1:] == told[:1] * 3


def test_another_command_goes_on_from_what_the_last_one_has_left(tmp_path: Path) -> None:
    """In the memory of a daemon that stays; no disk is given to it."""
    prompt = " ".join(["The cat lives in the barn."] * 15)
    with Daemon(tmp_path) as daemon:

        def run(prompt: str, *options: object) -> Outcome:
            asked = ("--raw", "-p", prompt, "-n", 4, "--context", 200, "--peer", daemon.address)
            return edge_command("run", MODEL, *asked, *options)

        told = [json.loads(run(text, "--json").out) for text in (prompt, prompt, f"{prompt} Why?")]
        counts = [each["statistics"]["prompt_tokens"] for each in told]
        found = [each["statistics"]["found_tokens"] for each in told]
        assert found == [0, *(min(each - 2, counts[0]) // 16 * 16 for each in counts[1:])]
        assert counts[0] > 100
        assert told[1]["token_ids"] == told[0]["token_ids"]
        explained = run(prompt, "--explain").err
        assert f"prompt: {counts[0]} tokens; {found[1]} of them were in the prefix" in explained
        assert daemon.describe().kv_beginnings_bytes


def test_edge_chat_computes_of_a_later_turn_what_is_new(talker: Path, tmp_path: Path) -> None:
    """Which it renders and makes tokens of again, whole, each time."""
    generation = edge.GenerationOptions(max_new_tokens=8, ignore_eos=True)
    options = edge.LoadOptions()
    with (
        Daemon(tmp_path, "--no-announce") as daemon,
        edge.Cluster.connect([daemon.address]) as cluster,
        cluster.load(talker, options) as model,
    ):
        talk = TerminalTalk(
            cluster,
            model,
            str(talker),
            options,
            Settings(generation=generation),
            Conversation(system="Be kind. " * 10),
            adapt=False,
            is_terminal=False,
        )
        read = []
        for question in ("Hello " * 10, "And?"):
            before = model.work.prompt_tokens
            talk.ask(question)
            read.append(model.work.prompt_tokens - before)
    first, second = read
    assert first > 60
    assert second < 30, "the second question, what the template adds, and no more"
