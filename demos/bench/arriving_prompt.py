"""Answers under way while a long prompt is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator

import click
import numpy as np

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import random_prompt

_STREAM_PROMPT_TOKENS = 32
_FIRST_TOKENS = 8
"""First tokens of an answer, which are not looked at."""


class Streams:
    """Answers under way, and when each of their tokens came."""

    def __init__(self, model: edge.AsyncModel) -> None:
        self._model = model
        self._seeds = itertools.count()
        self._came_s: list[list[float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def prompt(self, tokens: int) -> list[int]:
        """Like no other."""
        return random_prompt(self._model, tokens, next(self._seeds))

    async def first_token_s(self, prompt_tokens: int) -> float:
        """From asking to the first token of an answer to a prompt like no other."""
        begin_s = time.perf_counter()
        await self._model.generate(self.prompt(prompt_tokens), max_new_tokens=1, ignore_eos=True)
        return time.perf_counter() - begin_s

    async def begin(self, count: int, *, new_tokens: int) -> None:
        """Returns when each has a few tokens."""

        async def answer(came_s: list[float], is_under_way: asyncio.Event) -> None:
            prompt = self.prompt(_STREAM_PROMPT_TOKENS)
            options = edge.GenerationOptions(max_new_tokens=new_tokens, ignore_eos=True)
            async with self._model.stream(prompt, options) as stream:
                async for _token in stream:
                    came_s.append(time.perf_counter())
                    if len(came_s) == _FIRST_TOKENS:
                        is_under_way.set()

        self._came_s = [[] for _number in range(count)]
        under_way = [asyncio.Event() for _number in range(count)]
        self._tasks = [
            asyncio.create_task(answer(*each)) for each in zip(self._came_s, under_way, strict=True)
        ]
        for each in under_way:
            await each.wait()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def intervals_s(self, begin_s: float, end_s: float) -> list[float]:
        """Between two tokens of one answer, where the second came in this time."""
        return [
            after - before
            for came_s in self._came_s
            for before, after in itertools.pairwise(came_s)
            if begin_s < after <= end_s
        ]


@case.case(
    "answers while a long prompt arrives",
    case.shape(),
    case.FILE,
    *case.peers(2, 1),
    case.dtype(),
    case.number("--streams", 4),
    case.number("--prompt-tokens", 2000, least=2),
    click.option("--alone", "alone_s", default=3.0, show_default=True, help="Seconds around it."),
    case.rounds(3),
    case.FOLDER,
)
def arriving_prompt(given: Given) -> Iterator[Found]:
    """How evenly answers go on while a long prompt is read, and how long it waits for them.

    Some answers are under way. After a while somebody asks with a long prompt. For comparison, in
    the same minute: the answers without it, and the prompt alone.
    """

    async def measured() -> Figures:
        async with (
            await edge.AsyncCluster.local(given.peers, threads=given.threads) as cluster,
            await cluster.load(
                given.path,
                dtype=given.dtype,
                plan=given.plan,
                context_tokens=given.prompt_tokens + 64,
                concurrency=given.streams + 1,
                speculate="off",
            ) as model,
        ):
            figures, answers = Figures(), Streams(model)
            await answers.first_token_s(given.prompt_tokens)
            for _round in range(given.rounds):
                await _one_round(figures, answers, given)
            return figures

    yield Found(
        figures=asyncio.run(measured()),
        variant=f"{given.streams} answers, a prompt of {given.prompt_tokens} tokens, "
        f"{given.dtype}, {given.arrangement}",
        model=given.model,
    )


async def _one_round(figures: Figures, answers: Streams, given: Given) -> None:
    prompt_tokens, alone_s = given.prompt_tokens, given.alone_s
    prompt_alone_s = await answers.first_token_s(prompt_tokens)
    await answers.begin(given.streams, new_tokens=prompt_tokens)
    begin_s = time.perf_counter()
    await asyncio.sleep(alone_s)
    asked_s = time.perf_counter()
    first_s = await answers.first_token_s(prompt_tokens)
    end_s = time.perf_counter()
    await asyncio.sleep(alone_s)
    after_s = time.perf_counter()
    await answers.end()
    alone = answers.intervals_s(begin_s, asked_s) + answers.intervals_s(end_s, after_s)
    beside = answers.intervals_s(asked_s, end_s)
    for name, intervals_s in (("alone", alone), ("beside the prompt", beside)):
        for share in (50, 95, 100):
            which = f"p{share}" if share < 100 else "longest"
            value = float(np.percentile(intervals_s, share))
            figures.add(f"between tokens, {name}, {which}", "ms", 1e3 * value)
    p95 = [float(np.percentile(each, 95)) for each in (beside, alone)]
    figures.add("p95 between tokens, beside the prompt / alone", "x", p95[0] / p95[1])
    figures.add("first token of the prompt, alone", "s", prompt_alone_s)
    figures.add("first token of the prompt, beside answers", "s", first_s)
    figures.add("its ratio", "x", first_s / prompt_alone_s)
