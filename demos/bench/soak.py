"""Replies without a pause while peers join and leave, or while every core has other work."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import psutil

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.left_behind import SLACK, Held
from edge.demos.bench.results import Figures
from edge.demos.bundled import MODEL, STORY
from edge.demos.fleet import Fleet
from edge.runs.model import Recovery

_NAMES = ("a", "b", "c", "d")
_LEAST_PEERS = 2
"""That are there at any time."""
_LOOK_EVERY_S = 60.0
_COUNTED = {
    **{"replies": "replies", "tokens": "tokens", "replies lost": "replies"},
    **{"replies with other tokens": "replies", "peers that left": "events"},
    **{"peers that joined": "events", "plans that ended": "plans"},
}
"""Units, by what is counted."""
_PROMPTS = (STORY, "The cat sat", "What is 7 plus 5?", "In the barn " * 9)


@dataclass(slots=True, kw_only=True)
class Soak:
    """One model, while it lasts, and what is seen of it."""

    fleet: Fleet
    model: edge.AsyncModel
    options: edge.GenerationOptions
    dice: random.Random
    until_s: float
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each reply between two tokens."""
    held: dict[int, list[Held]] = field(default_factory=dict)
    """By each process, once a minute of its life; this one is 0."""

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
                self.errors.append(str(error))
                click.echo(f"LOST: {error}", err=True)
                if self.model.is_over:
                    self.until_s = 0.0
            else:
                self.counts["replies"] += 1
                self.counts["tokens"] += len(tokens)
                self.pauses_s.append(pause_s)
                if tokens != expected[which]:
                    self.counts["replies with other tokens"] += 1
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
                self.counts["peers that left"] += 1
                if self.dice.random() < 0.5:
                    self.fleet.leave(name)
                else:
                    await asyncio.to_thread(self.fleet.kill, name)
            else:
                joined = await asyncio.to_thread(self.fleet.renew)
                self.counts["peers that joined"] += len(joined)

    async def watch(self) -> None:
        """A look every minute, and one at the end."""
        while not self.is_over:
            self.look()
            await asyncio.sleep(min(_LOOK_EVERY_S, max(0.0, self.until_s - time.monotonic())))
        self.look()

    def look(self) -> None:
        for pid in (0, *(process.pid for process in self.fleet.processes.values())):
            with contextlib.suppress(psutil.Error):
                held = Held.by(psutil.Process(pid or None))
                self.held.setdefault(pid, []).append(held)
        counted = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        click.echo(f"{len(self.errors)} errors, {counted}; {self.held[0][-1]}", err=True)


async def _soaked(fleet: Fleet, given: Given) -> tuple[Soak, Sequence[Recovery]]:
    """What was seen in that time, and how the model went on after each loss."""
    readers, new_tokens, every_s = given.readers, given.new_tokens, given.every_s
    options = edge.GenerationOptions(max_new_tokens=new_tokens, ignore_eos=True, temperature=0.8)
    async with (
        await edge.AsyncCluster.connect(list(fleet.addresses.values())) as cluster,
        await cluster.load(
            MODEL,
            dtype=given.dtype,
            plan="pipeline",
            context_tokens=min(1024, 256 + 2 * new_tokens),
            concurrency=readers,
            batch_invariant=readers > 1,
        ) as model,
    ):
        expected = [
            [token.token_id async for token in model.stream(prompt, options, seed=which)]
            for which, prompt in enumerate(_PROMPTS)
        ]
        soak = Soak(
            fleet=fleet,
            model=model,
            options=options,
            dice=random.Random(given.seed),
            until_s=time.monotonic() + 60 * given.minutes,
        )
        tasks = [soak.reader(number, expected) for number in range(readers)]
        if every_s:
            tasks.append(soak.come_and_go(every_s))
        await asyncio.gather(soak.watch(), *tasks)
        return soak, model.recoveries


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


@case.case(
    "replies while peers come and go",
    click.option("--minutes", type=click.FloatRange(0), default=60.0, show_default=True),
    click.option("--every", "every_s", type=click.FloatRange(0), default=5.0, show_default=True,
                 help="Seconds between events; 0: nothing happens to any peer."),
    case.number("--busy", 0, "Processes beside, which take a core each.", least=0),
    case.number("--readers", 3),
    case.dtype(),
    case.number("--new-tokens", 60, least=8),
    click.option("--seed", default=0, show_default=True),
)  # fmt: skip
def soak(given: Given) -> Iterator[Found]:
    """Errors that readers saw, false alarms, and what became more.

    Some peers on this machine run one model for as long as asked. Readers ask for the same replies
    again and again. Every few seconds a peer leaves, is killed, or starts again; with --every 0
    nothing happens to any peer, so a loss is a false alarm. Once a minute it is looked what the
    processes take. It fails where a reader saw an error or other tokens, a false alarm was raised,
    or threads or descriptors became more.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(_NAMES, Path(folder)) as fleet,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(given.busy):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        seen, recoveries = asyncio.run(_soaked(fleet, given))
    of_coordinator, *of_peers = more = [*map(grown, seen.held.values())]
    threads, descriptors = (max(each[which] for each in more) for which in (0, 1))
    counts, found = seen.counts, Figures()
    counts["replies lost"], counts["plans that ended"] = len(seen.errors), len(recoveries)
    for name, unit in _COUNTED.items():
        found.add(name, unit, counts[name])
    found.add("longest pause of a reply", "s", *seen.pauses_s)
    p99_s = float(np.percentile(seen.pauses_s, 99))
    found.add("longest pause of a reply, 99th percentile", "s", p99_s)
    found.add("longest pause of all", "s", max(seen.pauses_s))
    found.add("more threads", "threads", threads)
    found.add("more descriptors", "files", descriptors)
    found.add("more memory, coordinator", "bytes", of_coordinator[2])
    found.add("more memory, peers", "bytes", max(each[2] for each in of_peers))
    bad = {
        "errors": bool(seen.errors),
        "other tokens": counts["replies with other tokens"] > 0,
        f"false alarms ({'; '.join(each.reason for each in recoveries)})": (
            bool(recoveries) and not given.every_s
        ),
        "threads": threads > SLACK,
        "descriptors": descriptors > SLACK,
    }
    yield Found(
        figures=found,
        question="" if given.every_s else "false alarms at full load",
        variant=f"{given.minutes:g} minutes, an event every {given.every_s:g} s, "
        f"{given.readers} readers, {given.dtype}, {len(_NAMES)} peers of 1 thread, {given.busy} "
        "busy processes",
        model="the bundled model",
        bad=[what for what, is_so in bad.items() if is_so],
    )
