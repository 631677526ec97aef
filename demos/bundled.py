"""The model that ships with Edge, and how the demos talk to it and report on it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from edge import Cluster, Model, Reply
from edge.demos.world import QUESTIONS, is_right
from edge.host.free_memory import format_size
from edge.partition import Plan

MODEL = Path(str(files("edge.demos"))) / "model"
"""The checkpoint's folder, in a checkout as in an installed wheel."""

ANSWERS = dict(QUESTIONS)
"""Beginnings of the right answers to questions about the made-up world."""

STORY = "Tell me a story about Mia."


def require(condition: bool, sentence: str) -> None:
    """End the demo with the sentence unless what it claims holds."""
    if not condition:
        raise SystemExit(f"demo failed: {sentence}")


def ask(model: Model, question: str) -> Reply:
    """Stream the model's answer to the terminal, check it, and return it."""
    print(f"\n  {question}\n  > ", end="", flush=True)
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": question}])
    with model.stream(prompt) as stream:
        for token in stream:
            print(token.text, end="", flush=True)
        reply = stream.reply()
    print()
    expected = ANSWERS[question]
    require(is_right(reply.text, expected), f"the answer should start with {expected!r}")
    return reply


def answers(model: Model, questions: list[str]) -> list[tuple[int, ...]]:
    """The token ids of the greedy answers, end tokens included."""
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions]
    return [model.generate(prompt).token_ids for prompt in prompts]


def show_same_tokens(*, peers: int, plan_of: Callable[[list[str]], Plan], asked: list[str]) -> None:
    """Local peers with a plan by hand, made of their names, give the same tokens as one alone."""
    with Cluster.local(peers=peers, threads=1) as cluster:
        with Cluster.connect([cluster.peers[0]]) as one:
            alone = answers(one.load(MODEL), asked)
        split = cluster.load(MODEL, plan=plan_of([peer.name for peer in cluster.peers]))
        together = answers(split, asked)
        show_who_did_what(split)
        require(alone == together, "the split changed the tokens")
        count = sum(map(len, together))
        print(f"\n  {count} tokens in {len(asked)} answers: the same as from one peer alone.")


def show_who_did_what(model: Model) -> None:
    """One line for each device: its part of every token, and the weights that took."""
    print()
    for number, stage in enumerate(model.plan.stages):
        for shard in stage.slices:
            name = model.peers[shard.device].name
            sent_bytes = model.sent_bytes[name]
            weights = f"was sent {format_size(sent_bytes)}" if sent_bytes else "had its weights"
            print(
                f"  {name}: stage {number}, layers {_span(stage.layers)}, "
                f"{_count(shard.heads, 'head')}, "
                f"{_count(shard.ffn_columns, 'feed-forward column')}, "
                f"{_count(shard.vocab, 'vocabulary row')}; {weights}"
            )


def _span(indices: range) -> str:
    return f"{indices.start}–{indices.stop - 1}"


def _count(indices: range, what: str) -> str:
    return f"{len(indices)} {what}{'' if len(indices) == 1 else 's'}"
