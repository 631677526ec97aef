"""Replies while peers are killed, stopped and told to leave: are they the same, and how long is the
pause?

python -m edge.demos.bench.faults --faults 40
python -m edge.demos.bench.faults --faults 1000 --append
python -m edge.demos.bench.faults --shape W --dtype int4 --kind killed --requests 1 --faults 5

Four peers on this machine, of which one to three run a plan that was drawn. Replies are made
undisturbed first. Then the same replies are asked for again, and at a random token something
happens to a random peer of the plan.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import click
import numpy as np
import psutil

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.results import Metric
from edge.demos.bench.shapes import checkpoint
from edge.demos.bundled import MODEL, STORY
from edge.demos.fleet import Fleet
from edge.partition import Plan
from edge.planning.load_options import Standby

Kind = Literal["killed", "stopped 1 s", "stopped 5 s", "told to leave"]
_STOPPED_S = {"stopped 1 s": 1.0, "stopped 5 s": 5.0}
_NAMES = ("a", "b", "c", "d")


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """Of the faults of one kind."""

    faults: int = 0
    replies: int = 0
    lost: int = 0
    different: int = 0
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each fault's replies between two tokens, from the fault on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One reply of a round."""

    tokens: tuple[int, ...]
    error: str | None
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for in a round: prompts with their seeds, and how."""

    prompts: tuple[tuple[str, int], ...]
    options: edge.GenerationOptions


async def replies(
    model: edge.AsyncModel, asked: Asked, *, at_token: int = 0, fault: Callable[[], None] | None
) -> list[Made]:
    """All at once. `fault` is called once the first has so many tokens."""
    happened_s: list[float] = []

    async def one(number: int, prompt: str, seed: int) -> Made:
        tokens: list[int] = []
        times_s: list[float] = []
        error = None
        try:
            async for token in model.stream(prompt, asked.options, seed=seed):
                tokens.append(token.token_id)
                times_s.append(time.monotonic())
                if not number and fault is not None and len(tokens) == at_token:
                    happened_s.append(times_s[-1])
                    fault()
        except edge.EdgeError as failure:
            error = str(failure)
        since = [t for t in times_s if happened_s and t >= happened_s[0]]
        gaps = np.diff([*happened_s, *since]) if since else [0.0]
        return Made(tokens=tuple(tokens), error=error, pause_s=float(max(gaps, default=0.0)))

    return list(await asyncio.gather(*(one(n, *each) for n, each in enumerate(asked.prompts))))


@dataclass(slots=True, kw_only=True)
class Injector:
    """Rounds of faults on one fleet."""

    fleet: Fleet
    cluster: edge.AsyncCluster
    path: Path
    dice: random.Random
    kinds: Sequence[Kind]
    new_tokens: int
    standby: Standby
    outcomes: dict[tuple[str, Kind], Outcomes] = field(default_factory=dict)

    async def plan(self, count: int, how: str) -> Plan:
        """Over so many peers, as the planner divides the model."""
        names = self.dice.sample(_NAMES, count)
        async with await edge.AsyncCluster.connect(
            [self.fleet.addresses[name] for name in names]
        ) as some:
            return (await some.propose(self.path, plan=how)).plan  # type: ignore[arg-type]

    def asked(self, requests: int) -> Asked:
        drawn = self.dice.random() < 0.5
        options = edge.GenerationOptions(
            max_new_tokens=self.new_tokens,
            ignore_eos=True,
            temperature=0.8 if drawn else 0.0,
            repetition_penalty=1.1 if drawn else 1.0,
        )
        texts = [STORY, "The cat sat", "What is 7 plus 5?", "In the barn " * 9]
        return Asked(
            prompts=tuple(
                (texts[number % len(texts)] + " and" * (number // len(texts)), number)
                for number in range(requests)
            ),
            options=options,
        )

    async def rounds(self, dtype: str, requests: int, faults: int) -> None:
        """One load, and so many faults while it runs."""
        plan = await self.plan(self.dice.choice([1, 2, 2, 3]), "pipeline")
        if len(plan.devices) > 1 and self.dice.random() < 0.5:
            plan = await self.plan(len(plan.devices), "tensor")
        async with await self.cluster.load(
            self.path,
            dtype=dtype,
            plan=plan,
            context_tokens=min(1024, 256 + 2 * self.new_tokens),
            concurrency=requests,
            standby=self.standby,
        ) as model:
            asked = self.asked(requests)
            undisturbed = await replies(model, asked, fault=None)
            for _number in range(faults):
                await self.one(dtype, model, asked, undisturbed)

    async def one(
        self, dtype: str, model: edge.AsyncModel, asked: Asked, undisturbed: list[Made]
    ) -> None:
        kind = self.dice.choice(self.kinds)
        names = {id: peer.name for id, peer in model.peers.items()}
        victim = names[self.dice.choice(model.plan.devices)]
        going_on: list[asyncio.Task[None]] = []

        async def go_on_later() -> None:
            await asyncio.sleep(_STOPPED_S[kind])
            self.fleet.go_on(victim)

        def fault() -> None:
            if kind == "killed":
                self.fleet.kill(victim)
            elif kind == "told to leave":
                self.fleet.leave(victim)
            else:
                self.fleet.stop(victim)
                going_on.append(asyncio.create_task(go_on_later()))

        at_token = self.dice.randrange(1, self.new_tokens)
        made = await replies(model, asked, at_token=at_token, fault=fault)
        for task in going_on:
            await task
        if kind in ("killed", "told to leave"):
            await asyncio.to_thread(self.fleet.processes[victim].wait)
            await asyncio.to_thread(self.fleet.renew)
        found = self.outcomes.setdefault((dtype, kind), Outcomes())
        found.faults += 1
        found.replies += len(made)
        found.lost += sum(each.error is not None for each in made)
        found.different += sum(
            each.error is None and each.tokens != one.tokens
            for each, one in zip(made, undisturbed, strict=True)
        )
        found.pauses_s.append(max(each.pause_s for each in made))
        for each, one in zip(made, undisturbed, strict=True):
            if each.error is not None:
                click.echo(f"{dtype}, {kind} {victim}: {each.error}", err=True)
            elif each.tokens != one.tokens:
                repair = model.proposal.repair
                pairs = zip(each.tokens, one.tokens, strict=True)
                first = next(index for index, (a, b) in enumerate(pairs) if a != b)
                click.echo(
                    f"{dtype}, {kind} {victim} at {at_token}, {len(made)} at once, repaired by "
                    f"{repair.method if repair is not None else 'nothing'}: other tokens from "
                    f"{first} on",
                    err=True,
                )


def held() -> tuple[int, int, int]:
    """Threads, descriptors and MiB of this process."""
    own = psutil.Process()
    return own.num_threads(), own.num_fds(), own.memory_info().rss >> 20


async def run(
    injector: Injector, dtypes: Sequence[str], requests: Sequence[int], faults: int, each: int
) -> None:
    done = 0
    while done < faults:
        count = min(each, faults - done)
        await injector.rounds(injector.dice.choice(dtypes), injector.dice.choice(requests), count)
        done += count
        click.echo(f"{done} of {faults}; threads, descriptors, MiB: {held()}", err=True)


@click.command()
@click.option("--faults", type=click.IntRange(1), default=40, show_default=True)
@click.option("--each", type=click.IntRange(1), default=8, show_default=True, help="Of a load.")
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "int4"), show_default=True)
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(get_args(Kind)), default=get_args(Kind)
)
@click.option("--requests", type=int, multiple=True, default=(1, 3, 8), show_default=True)
@click.option("--new-tokens", type=click.IntRange(8), default=60, show_default=True)
@click.option("--shape", help="A made-up model instead of the bundled one.")
@click.option("--standby", type=click.Choice(get_args(Standby)), default="none")
@click.option("--seed", default=0, show_default=True)
@folder_option
@append_option
def main(
    faults: int,
    each: int,
    dtypes: Sequence[str],
    kinds: Sequence[Kind],
    requests: Sequence[int],
    new_tokens: int,
    shape: str | None,
    standby: Standby,
    seed: int,
    folder: Path,
    append: bool,
) -> None:
    """Faults, replies that were lost or different, and pauses, by weight format and kind."""
    path = MODEL if shape is None else checkpoint(shape, folder)

    async def measured(fleet: Fleet) -> Injector:
        async with await edge.AsyncCluster.connect(list(fleet.addresses.values())) as cluster:
            injector = Injector(
                fleet=fleet,
                cluster=cluster,
                path=path,
                dice=random.Random(seed),
                kinds=kinds,
                new_tokens=new_tokens,
                standby=standby,
            )
            await run(injector, dtypes, requests, faults, each)
        return injector

    with tempfile.TemporaryDirectory() as own, Fleet(_NAMES, Path(own)) as fleet:
        injector = asyncio.run(measured(fleet))
    for (dtype, kind), found in sorted(injector.outcomes.items()):
        count = "replies" if found.replies != 1 else "reply"
        metrics = [
            Metric(name="faults", unit="faults", values=[found.faults]),
            Metric(name=count, unit="replies", values=[found.replies]),
            Metric(name="replies lost", unit="replies", values=[found.lost]),
            Metric(name="replies with other tokens", unit="replies", values=[found.different]),
            Metric(name="pause", unit="s", values=found.pauses_s),
            Metric(name="pause, 95th percentile", unit="s", values=[p95(found.pauses_s)]),
        ]
        click.echo(f"\n{dtype}, {kind}")
        results.publish(
            metrics,
            question="a reply while a peer is lost",
            variant=f"{kind}, {dtype}, 4 x 1 threads, {new_tokens} tokens, "
            f"{'/'.join(map(str, requests))} at once, standby {standby}",
            link="TCP over loopback",
            model="the bundled model" if shape is None else shape,
            keep=append,
        )


def p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95))


if __name__ == "__main__":
    main()
