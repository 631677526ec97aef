"""A promise that keeps moving: replies go on, and the peer stays under every budget it is told.

python -m edge.demos.bench.moving_budget --shape W --minutes 10 --append
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.limited.cases import CONTEXT_TOKENS
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.bench.shapes import checkpoint, described
from edge.demos.limited_peer import LimitedPeer, limited_peer
from edge.host.cache_paths import CACHE_VARIABLE
from edge.weights.formats import Dtype

MIB = float(1 << 20)

LEAST_SHARE = 0.25
"""Share of the weights in memory in the smallest budget; the largest has room for all of them."""

NUM_PROMPTS = 6
MOST_REPLIES = 3
"""That end under one budget before it moves."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: Tokens
    new_tokens: int


@dataclass(slots=True)
class Asking:
    """As many replies under way as `threads` has room for, and what is wrong with those that end.

    Ends with the block: it waits for what is under way.
    """

    model: edge.Model
    expected: list[tuple[Question, Tokens]]
    chance: np.random.Generator
    threads: ThreadPoolExecutor
    at_once: int
    num_replies: int = 0
    num_tokens: int = 0
    num_others: int = 0
    """Replies with other tokens than expected."""
    under_way: dict[Future[Tokens], Tokens] = field(default_factory=dict)

    def until(self, count: int) -> None:
        """Until `count` more replies have ended, others always under way."""
        while count > 0:
            while len(self.under_way) < self.at_once:
                question, tokens = self.expected[self.chance.integers(len(self.expected))]
                self.under_way[self.threads.submit(ask, self.model, question)] = tokens
            count -= self._take(wait(self.under_way, return_when=FIRST_COMPLETED).done)

    def end(self) -> None:
        """No more are asked; those under way are waited for."""
        while self.under_way:
            self._take(wait(self.under_way).done)

    def _take(self, done: set[Future[Tokens]]) -> int:
        for each in done:
            wanted, found = self.under_way.pop(each), each.result()
            self.num_replies += 1
            self.num_tokens += len(found)
            self.num_others += found != wanted
        return len(done)


def ask(model: edge.Model, question: Question) -> Tokens:
    return model.generate(
        list(question.prompt), max_new_tokens=question.new_tokens, ignore_eos=True
    ).token_ids


def questions(chance: np.random.Generator, vocab_size: int) -> list[Question]:
    """Questions of different lengths; the context has room for each."""
    found = []
    for _ in range(NUM_PROMPTS):
        length, new_tokens = chance.integers(4, 24), chance.integers(8, CONTEXT_TOKENS - 24)
        prompt = tuple(chance.integers(vocab_size, size=length).tolist())
        found.append(Question(prompt=prompt, new_tokens=int(new_tokens)))
    return found


def budgets(chance: np.random.Generator, *, taken_bytes: int, weight_bytes: int) -> Iterator[int]:
    """Anything between a part of the weights and all that the model takes, for ever."""
    least_bytes = taken_bytes - (1 - LEAST_SHARE) * weight_bytes
    while True:
        yield int(chance.uniform(least_bytes, taken_bytes))


def move(
    peer: LimitedPeer,
    cluster: edge.Cluster,
    asking: Asking,
    wanted: Iterator[int],
    *,
    ends: Iterator[bool],
) -> Figures:
    """Budget after budget while replies go on, until `ends` says so after one of them.

    What is too much must be given back when the peer has answered: from then on, and until it is
    told another budget, its peak counts against this one; meanwhile, against the larger of two.
    """
    figures = Figures()
    (info,) = cluster.peers
    before = info.memory_bytes
    asking.until(1)
    peer.reset_peak()
    while not next(ends):
        budget = next(wanted)
        start_s = time.perf_counter()
        told = cluster.set_memory(info, budget)
        took_s = time.perf_counter() - start_s
        figures.add(
            "peak resident meanwhile / larger budget", "ratio", _share(peer, before, budget)
        )
        peer.reset_peak()
        tokens, start_s = asking.num_tokens, time.perf_counter()
        asking.until(int(asking.chance.integers(1, MOST_REPLIES + 1)))
        rate = (asking.num_tokens - tokens) / (time.perf_counter() - start_s)
        figures.add("budget", "MiB", budget / MIB)
        figures.add("peak resident / budget", "ratio", _share(peer, budget))
        figures.add("streamed for a token", "MB", told.models[0].streamed_bytes / 1e6)
        figures.add("all replies", "tok/s", rate)
        name = "less memory, told to given back" if budget < before else "more memory, told to done"
        figures.add(name, "s", took_s)
        before = budget
    return figures


def _share(peer: LimitedPeer, *budgets_bytes: int) -> float:
    """The most that the peer had since this was reset, as a share of the largest of these
    budgets."""
    return peer.peak_bytes / max(budgets_bytes)


def run(
    path: Path,
    *,
    cache: Path,
    dtype: Dtype,
    block_size: int,
    threads: int,
    at_once: int,
    seed: int,
    ends: Iterator[bool],
) -> Figures:
    """One peer, first with memory for all: what it says then is what it has to say ever after."""
    chance = np.random.default_rng(seed)
    with (
        limited_peer(cache=cache, threads=threads) as peer,
        edge.Cluster.connect([peer.address]) as cluster,
        cluster.load(
            path,
            dtype=dtype,
            block_size=block_size,
            context_tokens=CONTEXT_TOKENS,
            concurrency=at_once,
        ) as model,
        ThreadPoolExecutor(at_once) as pool,
    ):
        asked = questions(chance, model.vocab_size)
        expected = [(question, ask(model, question)) for question in asked]
        with edge.Cluster.connect([peer.address]) as seen:
            (info,) = seen.peers
        (row,) = model.proposal.rows
        asking = Asking(model, expected, chance, pool, at_once)
        moving = budgets(
            chance,
            taken_bytes=info.memory_bytes - info.free_bytes,
            weight_bytes=row.memory.weight_bytes,
        )
        try:
            figures = move(peer, cluster, asking, moving, ends=ends)
        finally:
            asking.end()
        peaks = figures.values["peak resident / budget", "ratio"]
        meanwhile = figures.values["peak resident meanwhile / larger budget", "ratio"]
        figures.add("budgets", "count", len(peaks))
        figures.add("highest peak resident / budget", "ratio", max(peaks))
        figures.add("highest peak meanwhile / larger budget", "ratio", max(meanwhile))
        figures.add("replies", "count", asking.num_replies)
        figures.add("replies with other tokens", "count", asking.num_others)
        return figures


def after_minutes(minutes: float) -> Iterator[bool]:
    end_s = time.monotonic() + 60 * minutes
    while True:
        yield time.monotonic() >= end_s


def after_budgets(count: int) -> Iterator[bool]:
    yield from [False] * count
    yield True


@click.command()
@shape_option()
@click.option(
    "--dtype", type=click.Choice(["int4-pure", "float32"]), default="int4-pure", show_default=True
)
@click.option("--block-size", type=int, default=128, show_default=True)
@click.option("--minutes", type=click.FloatRange(0), default=10.0, show_default=True)
@click.option("--budgets", "count", type=click.IntRange(1), help="This many instead of minutes.")
@click.option(
    "--at-once",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Replies under way. Several share steps, which rounds int4 products differently.",
)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@folder_option
@append_option
def main(
    shape: str,
    minutes: float,
    count: int | None,
    folder: Path,
    append: bool,
    **options: Any,
) -> None:
    """Ends with 1 if a budget was exceeded, or a reply had other tokens."""
    os.environ[CACHE_VARIABLE] = str(folder / "limited")
    figures = run(
        checkpoint(shape, folder),
        cache=folder / "limited",
        **options,
        ends=after_minutes(minutes) if count is None else after_budgets(count),
    )
    length = f"{minutes:g} minutes" if count is None else f"{count} budgets"
    dtype = options["dtype"]
    form = f"int4-pure/{options['block_size']}" if dtype == "int4-pure" else dtype
    results.publish(
        figures.metrics(),
        question="a budget that moves while replies go on",
        variant=f"{form}, {options['threads']} threads, {options['at_once']} replies at once, "
        f"{length}, seed {options['seed']}",
        link="none",
        model=described(shape),
        keep=append,
    )
    sys.exit(not keeps_its_promise(figures))


def keeps_its_promise(figures: Figures) -> bool:
    most = {name: max(values) for (name, _unit), values in figures.values.items()}
    return (
        most["highest peak resident / budget"] <= 1
        and most["highest peak meanwhile / larger budget"] <= 1
        and most["replies with other tokens"] == 0
    )


if __name__ == "__main__":
    main()
