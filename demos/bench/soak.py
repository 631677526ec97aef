"""Replies without a pause while peers join and leave, or while every core has other work.

python -m edge.demos.bench.soak --minutes 60
python -m edge.demos.bench.soak --minutes 60 --every 0 --busy 1

Some peers on this machine run one model for as long as asked. Readers ask for the same replies
again and again. Every few seconds a peer leaves, is killed, or starts again; with --every 0 nothing
happens to any peer, so a loss is a false alarm. Once a minute it is looked what the processes take.
It fails where a reader saw an error or other tokens, a false alarm was raised, or threads or
descriptors became more.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import psutil

import edge
from edge.demos.bench import results
from edge.demos.bench.left_behind import SLACK, Held
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Metric
from edge.demos.bundled import MODEL, STORY
from edge.demos.fleet import Fleet
from edge.runs.model import Recovery
from edge.weights.formats import Dtype

_NAMES = ("a", "b", "c", "d")
_LEAST_PEERS = 2
"""That are there at any time."""
_LOOK_EVERY_S = 60.0
_PROMPTS = (STORY, "The cat sat", "What is 7 plus 5?", "In the barn " * 9)


@dataclass(slots=True, kw_only=True)
class Seen:
    """By readers, and by who looked at the processes."""

    replies: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    different: int = 0
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each reply between two tokens."""
    left: int = 0
    joined: int = 0
    held: list[Held] = field(default_factory=list)
    """By the coordinator, once a minute."""
    peers: dict[int, list[Held]] = field(default_factory=dict)
    """By each process of a peer, once a minute of its life."""


@dataclass(slots=True, kw_only=True)
class Soak:
    """One model, while it lasts."""

    fleet: Fleet
    model: edge.AsyncModel
    options: edge.GenerationOptions
    dice: random.Random
    until_s: float
    seen: Seen = field(default_factory=Seen)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until_s

    async def reader(self, number: int, expected: Sequence[Sequence[int]]) -> None:
        """One reply after the other."""
        while not self.is_over:
            which = number % len(_PROMPTS)
            tokens: list[int] = []
            last_s, pause_s = None, 0.0
            try:
                async for token in self.model.stream(_PROMPTS[which], self.options, seed=which):
                    now_s = time.monotonic()
                    pause_s = max(pause_s, now_s - (last_s or now_s))
                    last_s = now_s
                    tokens.append(token.token_id)
            except edge.EdgeError as error:
                self.seen.errors.append(str(error))
                click.echo(f"LOST: {error}", err=True)
                if self.model.is_over:
                    self.until_s = 0.0
            else:
                self.seen.replies += 1
                self.seen.tokens += len(tokens)
                self.seen.pauses_s.append(pause_s)
                if expected and tuple(tokens) != tuple(expected[which]):
                    self.seen.different += 1
                    click.echo(f"DIFFERENT: prompt {which}", err=True)
            number += 1

    async def come_and_go(self, every_s: float) -> None:
        """A peer leaves, or one that left is there again."""
        begin_s = time.monotonic()
        count = 0
        while not self.is_over:
            count += 1
            await asyncio.sleep(max(0.0, begin_s + count * every_s - time.monotonic()))
            running = [name for name, each in self.fleet.processes.items() if each.poll() is None]
            if (len(running) > _LEAST_PEERS and self.dice.random() < 0.5) or (
                len(running) == len(self.fleet.processes)
            ):
                name = self.dice.choice(running)
                self.seen.left += 1
                if self.dice.random() < 0.5:
                    self.fleet.leave(name)
                else:
                    await asyncio.to_thread(self.fleet.kill, name)
            else:
                self.seen.joined += len(await asyncio.to_thread(self.fleet.renew))

    async def watch(self) -> None:
        """A look every minute, and one at the end."""
        while not self.is_over:
            self.look()
            await asyncio.sleep(min(_LOOK_EVERY_S, max(0.0, self.until_s - time.monotonic())))
        self.look()

    def look(self) -> None:
        self.seen.held.append(Held.by(psutil.Process()))
        for process in self.fleet.processes.values():
            with contextlib.suppress(psutil.Error):
                held = Held.by(psutil.Process(process.pid))
                self.seen.peers.setdefault(process.pid, []).append(held)
        click.echo(
            f"{self.seen.replies} replies, {len(self.seen.errors)} errors, "
            f"{self.seen.different} different, {self.seen.left} left, {self.seen.joined} "
            f"joined, {len(self.model.recoveries)} recoveries; {self.seen.held[-1]}",
            err=True,
        )


def _burn() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Runs `processes` processes that do nothing, as fast as they can."""
    context = multiprocessing.get_context("spawn")
    burning = [context.Process(target=_burn, daemon=True) for _number in range(processes)]
    for each in burning:
        each.start()
    try:
        yield
    finally:
        for each in burning:
            each.kill()
            each.join()


async def soaked(
    fleet: Fleet,
    *,
    minutes: float,
    every_s: float,
    readers: int,
    dtype: Dtype,
    new_tokens: int,
    seed: int,
) -> tuple[Seen, Sequence[Recovery]]:
    """What was seen in that time, and how the model went on after each loss."""
    async with (
        await edge.AsyncCluster.connect(list(fleet.addresses.values())) as cluster,
        await cluster.load(
            MODEL,
            dtype=dtype,
            plan="pipeline",
            context_tokens=min(1024, 256 + 2 * new_tokens),
            concurrency=readers,
            batch_invariant=readers > 1,
        ) as model,
    ):
        options = edge.GenerationOptions(
            max_new_tokens=new_tokens, ignore_eos=True, temperature=0.8
        )
        expected = [
            [token.token_id async for token in model.stream(prompt, options, seed=which)]
            for which, prompt in enumerate(_PROMPTS)
        ]
        soak = Soak(
            fleet=fleet,
            model=model,
            options=options,
            dice=random.Random(seed),
            until_s=time.monotonic() + 60 * minutes,
        )
        tasks = [soak.reader(number, expected) for number in range(readers)]
        if every_s:
            tasks.append(soak.come_and_go(every_s))
        await asyncio.gather(soak.watch(), *tasks)
        return soak.seen, model.recoveries


def grown(held: Sequence[Held]) -> tuple[int, int, int]:
    """Threads, descriptors and bytes that became more from the second third of the looks to the
    last: what is made once is there by then. Of each third the least counts, for a process holds
    more while a plan gives it a part, or replies are under way."""
    third = len(held) // 3
    if not third:
        return 0, 0, 0
    first, last = held[third : 2 * third], held[2 * third :]
    return (
        min(each.threads for each in last) - min(each.threads for each in first),
        min(each.descriptors for each in last) - min(each.descriptors for each in first),
        min(each.memory_bytes for each in last) - min(each.memory_bytes for each in first),
    )


@click.command()
@click.option("--minutes", type=click.FloatRange(0), default=60.0, show_default=True)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds from one event to the next; 0: nothing happens to any peer.",
)
@click.option("--busy", "burning", type=click.IntRange(0), default=0, help="Processes beside.")
@click.option("--readers", type=click.IntRange(1), default=3, show_default=True)
@click.option("--dtype", default="int4", show_default=True)
@click.option("--new-tokens", type=click.IntRange(8), default=60, show_default=True)
@click.option("--seed", default=0, show_default=True)
@append_option
def main(
    minutes: float,
    every_s: float,
    burning: int,
    readers: int,
    dtype: Dtype,
    new_tokens: int,
    seed: int,
    append: bool,
) -> None:
    """Errors that readers saw, false alarms, and what became more."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(_NAMES, Path(folder)) as fleet,
        busy(burning),
    ):
        seen, recoveries = asyncio.run(
            soaked(
                fleet,
                minutes=minutes,
                every_s=every_s,
                readers=readers,
                dtype=dtype,
                new_tokens=new_tokens,
                seed=seed,
            )
        )
    more = [grown(seen.held), *(grown(each) for each in seen.peers.values())]
    p99_s = float(np.percentile(seen.pauses_s, 99))
    metrics = [
        Metric(name="replies", unit="replies", values=[seen.replies]),
        Metric(name="tokens", unit="tokens", values=[seen.tokens]),
        Metric(name="replies lost", unit="replies", values=[len(seen.errors)]),
        Metric(name="replies with other tokens", unit="replies", values=[seen.different]),
        Metric(name="peers that left", unit="events", values=[seen.left]),
        Metric(name="peers that joined", unit="events", values=[seen.joined]),
        Metric(name="plans that ended", unit="plans", values=[len(recoveries)]),
        Metric(name="longest pause of a reply", unit="s", values=seen.pauses_s),
        Metric(name="longest pause of a reply, 99th percentile", unit="s", values=[p99_s]),
        Metric(name="longest pause of all", unit="s", values=[max(seen.pauses_s)]),
        Metric(name="more threads", unit="threads", values=[max(each[0] for each in more)]),
        Metric(name="more descriptors", unit="files", values=[max(each[1] for each in more)]),
        Metric(name="more memory, coordinator", unit="bytes", values=[more[0][2]]),
        Metric(name="more memory, peers", unit="bytes", values=[max(m[2] for m in more[1:])]),
    ]
    results.publish(
        metrics,
        question="replies while peers come and go" if every_s else "false alarms at full load",
        variant=(
            f"{minutes:g} minutes, an event every {every_s:g} s, {readers} readers, {dtype}, "
            f"{len(_NAMES)} peers of 1 thread, {burning} busy processes"
        ),
        link="TCP over loopback",
        model="the bundled model",
        keep=append,
    )
    for each in recoveries:
        if not every_s:
            click.echo(f"false alarm: {each.reason}", err=True)
    bad = [
        *(["errors"] if seen.errors else []),
        *(["other tokens"] if seen.different else []),
        *(["false alarms"] if recoveries and not every_s else []),
        *(["threads"] if max(each[0] for each in more) > SLACK else []),
        *(["descriptors"] if max(each[1] for each in more) > SLACK else []),
    ]
    if bad:
        raise SystemExit(f"not as promised: {', '.join(bad)}")


if __name__ == "__main__":
    main()
