"""The pause of an answer that loses one of the two devices that run it, a third one at hand.

python -m edge.demos.bench.pause --shape W --layout pipeline --standby none --standby kv

Three daemons of one thread on this machine. The third has the lost shard in its cache. Against it:
one prefill of as many tokens as there were, and what a token takes, both before the loss.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import click

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.bench.shapes import checkpoint, described
from edge.demos.fleet import Fleet
from edge.partition import Plan
from edge.planning.load_options import Standby

AFTER = 16
"""Tokens that are still to come at the loss."""

Layout = Literal["pipeline", "tensor"]


def with_stand_in(plan: Plan, lost: str, stand_in: str) -> Plan:
    """The plan with another device in the seats of one."""
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                shards=tuple(
                    each.on(stand_in) if each.device == lost else each for each in stage.shards
                ),
            )
            for stage in plan.stages
        ),
    )


async def measure(
    path: Path, layout: Layout, standby: Standby, figures: Figures, *, prompt: int, before: int
) -> list[int]:
    """One loss, before + 1 tokens into an answer; the tokens of the answer."""
    with tempfile.TemporaryDirectory() as folder, Fleet("abc", Path(folder)) as fleet:
        address = fleet.addresses
        context_tokens = prompt + before + 2 * AFTER
        async with await edge.AsyncCluster.connect([address["a"], address["b"]]) as two:
            plan = (
                await two.propose(path, plan=layout, dtype="int4", context_tokens=context_tokens)
            ).plan
        async with await edge.AsyncCluster.connect(list(address.values())) as cluster:
            ids = {peer.name: peer.id for peer in cluster.peers}
            stand_in = with_stand_in(plan, ids["b"], ids["c"])
            load = partial(cluster.load, path, dtype="int4", context_tokens=context_tokens)
            async with await load(plan=stand_in):
                pass  # it has the shard in its cache from now on
            async with await load(plan=plan, standby=standby) as model:
                return await _lose(model, fleet, figures, list(range(5, 5 + prompt)), before=before)


async def _lose(
    model: edge.AsyncModel, fleet: Fleet, figures: Figures, prompt: Sequence[int], *, before: int
) -> list[int]:
    length = len(prompt) + before
    begin_s = time.monotonic()
    async for _token in model.stream(list(range(1000, 1000 + length)), max_new_tokens=1):
        figures.add("one prefill of that length", "s", time.monotonic() - begin_s)
    tokens: list[int] = []
    told_s: list[float] = []
    async with model.stream(prompt, max_new_tokens=before + AFTER, ignore_eos=True) as stream:
        async for token in stream:
            told_s.append(time.monotonic())
            tokens.append(token.token_id)
            if len(told_s) == before:
                fleet.kill("b")
                killed_s = time.monotonic()
    gaps = [later - sooner for sooner, later in pairwise(told_s)]
    (recovery,) = model.recoveries
    after = slice(before - 1, None)
    resumed_s = max(zip(gaps[after], told_s[1:][after], strict=True))[1]
    figures.add("pause", "s", resumed_s - killed_s)
    figures.add("of it until the model was loaded again", "s", recovery.pause_s)
    figures.add("of it computed again", "s", resumed_s - killed_s - recovery.pause_s)
    figures.add("a token before", "ms", 1e3 * statistics.median(gaps[: before - 1]))
    return tokens


@click.command()
@shape_option()
@click.option("--layout", type=click.Choice(get_args(Layout)), default="pipeline")
@click.option("--standby", "standbys", type=click.Choice(get_args(Standby)), multiple=True)
@click.option("--prompt", type=click.IntRange(1), default=64, show_default=True, help="Tokens.")
@click.option("--before", type=click.IntRange(2), default=500, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@folder_option
@append_option
def main(
    shape: str,
    layout: Layout,
    standbys: tuple[Standby, ...],
    prompt: int,
    before: int,
    rounds: int,
    folder: Path,
    append: bool,
) -> None:
    """Each way in turn, so that what else the machine does falls on all of them."""
    path = checkpoint(shape, folder)
    ways: Sequence[Standby] = standbys or get_args(Standby)
    figures = {way: Figures() for way in ways}
    answers: list[list[int]] = []
    for _round in range(rounds):
        for way in ways:
            measured = measure(path, layout, way, figures[way], prompt=prompt, before=before)
            answers.append(asyncio.run(measured))
    if any(each != answers[0] for each in answers):
        raise SystemExit("answers differ")
    for way, each in figures.items():
        results.publish(
            each.metrics(),
            question="the pause of a lost device",
            variant=f"{layout} on 2 of 3 peers of 1 thread, int4, {before} tokens after a prompt "
            f"of {prompt}, standby {way}",
            link="TCP over loopback",
            model=described(shape),
            keep=append,
        )


if __name__ == "__main__":
    main()
