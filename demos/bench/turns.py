"""Sides that answer in turn: ratios are taken within a round, as the speed of a machine moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import edge
from edge.demos.bench.results import Figures

K = TypeVar("K")
T = TypeVar("T")
Speeds = Mapping[str, float]
"""By what was done, such as `decode 64`."""


def in_turn(sides: Mapping[K, Callable[[int], T]], rounds: int) -> Iterator[dict[K, T]]:
    """What each side gives for the number of a round, after a round that warms up.

    Every second round begins with the last side.
    """
    for count in range(rounds + 1):
        order = list(sides) if count % 2 else list(sides)[::-1]
        found = {name: sides[name](count) for name in order}
        if count:
            yield {name: found[name] for name in sides}


def compared(
    sides: Mapping[str, Callable[[int], Speeds]],
    rounds: int,
    *,
    over: str,
    unit: str = "tok/s",
    figures: Figures | None = None,
) -> Figures:
    """Figures of every side in every round, and of its ratio to the side `over`."""
    found = Figures() if figures is None else figures
    for turn in in_turn(sides, rounds):
        for part, base in turn[over].items():
            for name, speeds in turn.items():
                found.add(f"{part}, {name}", unit, speeds[part])
            for name, speeds in turn.items():
                if name != over:
                    found.add(f"{part}, {name} / {over}", "ratio", speeds[part] / base)
    return found


def local_model(
    stack: contextlib.ExitStack, path: Path, *, peers: int = 1, threads: int = 1, **options: Any
) -> edge.Model:
    """A model on peers of its own, until the stack closes."""
    cluster = stack.enter_context(edge.Cluster.local(peers, threads=threads))
    return stack.enter_context(cluster.load(path, speculate="off", **options))


def random_prompt(model: edge.Model | edge.AsyncModel, tokens: int, seed: int) -> list[int]:
    """The same for each model of a vocabulary; another for each seed, so that none is found again
    in a cache."""
    ids: list[int] = np.random.default_rng(seed).integers(model.vocab_size, size=tokens).tolist()
    return ids


def answering(
    model: edge.Model, prompt_tokens: int, new_tokens: int
) -> Callable[[int], dict[str, float]]:
    """A side: tokens per second of one reply."""

    def answer(number: int) -> dict[str, float]:
        prompt = random_prompt(model, prompt_tokens, number)
        reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
        assert len(reply.token_ids) == new_tokens, reply.finish_reason
        return {
            f"prefill {prompt_tokens}": prompt_tokens / reply.statistics["first_token_s"],
            f"decode {new_tokens}": reply.tokens_per_s,
        }

    return answer
