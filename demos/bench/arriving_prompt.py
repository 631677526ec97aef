"""How evenly answers go on while a long prompt is read, and how long it waits for them.

python -m edge.demos.bench.arriving_prompt --shape W --peers 2

Some answers are under way. After a while somebody asks with a long prompt. For comparison, in the
same minute: the answers without it, and the prompt alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from pathlib import Path

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.shapes import checkpoint, described
from edge.partition import Parallel
from edge.weights.formats import Dtype

_STREAM_PROMPT_TOKENS = 32
_FIRST_TOKENS = 8
"""First tokens of an answer, which are not looked at."""


class Streams:
    """Answers under way, and when each of their tokens came."""

    def __init__(self, model: edge.AsyncModel, random: np.random.Generator) -> None:
        self._model = model
        self._random = random
        self._came_s: list[list[float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def prompt(self, tokens: int) -> list[int]:
        return [int(each) for each in self._random.integers(3, self._model.vocab_size, size=tokens)]

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


async def measured(
    path: Path,
    *,
    peers: int,
    threads: int,
    plan: Parallel,
    dtype: Dtype,
    streams: int,
    prompt_tokens: int,
    alone_s: float,
    rounds: int,
) -> Figures:
    """What the answers and the prompt took, round after round."""
    figures = Figures()
    async with (
        await edge.AsyncCluster.local(peers, threads=threads) as cluster,
        await cluster.load(
            path,
            dtype=dtype,
            plan=plan,
            context_tokens=prompt_tokens + 64,
            concurrency=streams + 1,
        ) as model,
    ):
        answers = Streams(model, np.random.default_rng(0))
        await answers.first_token_s(prompt_tokens)
        for _round in range(rounds):
            prompt_alone_s = await answers.first_token_s(prompt_tokens)
            await answers.begin(streams, new_tokens=prompt_tokens)
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
    return figures


@click.command()
@shape_option()
@click.option("--checkpoint", "own", type=click.Path(exists=True, path_type=Path))
@click.option("--peers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each.")
@click.option("--plan", default="tensor", show_default=True)
@click.option("--dtype", default="int4", show_default=True)
@click.option("--streams", type=click.IntRange(1), default=4, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(2), default=2000, show_default=True)
@click.option(
    "--alone", "alone_s", default=3.0, show_default=True, help="Seconds before it and after."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@folder_option
@append_option
def main(
    shape: str,
    own: Path | None,
    peers: int,
    threads: int,
    plan: Parallel,
    dtype: Dtype,
    streams: int,
    prompt_tokens: int,
    alone_s: float,
    rounds: int,
    folder: Path,
    append: bool,
) -> None:
    """Time between tokens of answers under way, and to the first token of a long prompt."""
    path = checkpoint(shape, folder) if own is None else own
    figures = asyncio.run(
        measured(
            path,
            peers=peers,
            threads=threads,
            plan=plan,
            dtype=dtype,
            streams=streams,
            prompt_tokens=prompt_tokens,
            alone_s=alone_s,
            rounds=rounds,
        )
    )
    results.publish(
        figures.metrics(),
        question="answers while a long prompt arrives",
        variant=(
            f"{streams} answers, a prompt of {prompt_tokens} tokens, {dtype}, "
            f"{peers} x {threads} threads, {plan}"
        ),
        link="TCP over loopback",
        model=described(shape) if own is None else own.name,
        keep=append,
    )


if __name__ == "__main__":
    main()
