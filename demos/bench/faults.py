"""Replies while peers are killed, stopped, cut off: are they the same, and how long is a pause?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.fault_kinds import KINDS, WEIGHTS, Injection, Kind, applies
from edge.demos.bench.left_behind import Watch
from edge.demos.bench.results import Figures
from edge.demos.bundled import MODEL, STORY
from edge.demos.fleet import Fleet
from edge.demos.relay import Relay
from edge.partition import Plan
from edge.planning.load_options import Standby
from edge.weights.formats import Dtype

Place = Literal["memory", "disk"]
"""Where layers, and keys and values, are."""

_NAMES = ("a", "b", "c", "d", "e")
_MOST_ALONE = 2
"""Faults of one load after the plan has come down to one device."""
_CACHE_BYTES = 64 << 20
_DISK_OPTIONS = ("--kv-memory", "3MiB", "--kv-disk")
_TEXTS = (STORY, "The cat sat", "What is 7 plus 5?", "In the barn " * 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one fault did; a line of the file of --record."""

    dtype: Dtype
    kind: Kind
    place: Place
    requests: int
    new_tokens: int
    devices: int
    """Devices of the plan that was hurt."""
    lost: int
    different: int
    different_by_cut: int
    """Replies of a quantised model whose slices were cut anew: those may differ."""
    pause_s: float
    """The longest of the replies between two tokens, from the fault on."""
    recovered: bool


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
        self, model: edge.AsyncModel, *, at_token: int = 0, fault: Callable[[], None] = lambda: None
    ) -> list[Made]:
        """All at once. `fault` is called once the first has `at_token` tokens."""
        happened_s: list[float] = []

        async def one(number: int, prompt: str, seed: int) -> Made:
            tokens: list[int] = []
            times_s: list[float] = []
            error = None
            try:
                async for token in model.stream(prompt, self.options, seed=seed):
                    tokens.append(token.token_id)
                    times_s.append(time.monotonic())
                    if not number and len(tokens) == at_token:
                        happened_s.append(times_s[-1])
                        fault()
            except edge.EdgeError as failure:
                error = str(failure)
            since = [t for t in times_s if happened_s and t >= happened_s[0]]
            gaps = np.diff([*happened_s, *since]) if since else [0.0]
            return Made(tokens=tuple(tokens), error=error, pause_s=float(max(gaps, default=0.0)))

        return list(await asyncio.gather(*(one(n, *each) for n, each in enumerate(self.prompts))))


@dataclass(slots=True, kw_only=True)
class Injector:
    """Rounds of faults on one fleet."""

    fleet: Fleet
    relays: Mapping[str, Relay]
    has_small_disks: bool
    path: Path
    dice: random.Random
    given: Given
    """The options of the case."""
    watch: Watch = field(default_factory=Watch)
    records: list[Record] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was left behind after a model, in words."""

    async def _plan(self, count: int, how: Any) -> Plan:
        """A plan over `count` peers, as the planner divides the model."""
        names = self.dice.sample(list(self.relays), min(count, len(self.relays)))
        addresses = [self.relays[name].address for name in names]
        async with await edge.AsyncCluster.connect(addresses) as some:
            plan = (await some.propose(self.path, plan=how, measure="nothing")).plan
        return _streamed(plan) if self.given.place == "disk" else plan

    def _asked(self, requests: int) -> Asked:
        drawn = self.dice.random() < 0.5
        return Asked(
            prompts=tuple(
                (_TEXTS[number % len(_TEXTS)] + " and" * (number // len(_TEXTS)), number)
                for number in range(requests)
            ),
            options=edge.GenerationOptions(
                max_new_tokens=self.given.new_tokens,
                ignore_eos=True,
                temperature=0.8 if drawn else 0.0,
                repetition_penalty=1.1 if drawn else 1.0,
            ),
        )

    async def rounds(
        self, cluster: edge.AsyncCluster, dtype: Dtype, requests: int, faults: int
    ) -> None:
        """One load, and `faults` faults while it runs."""
        plan = await self._plan(self.dice.choice([2, 2, 3, 4]), "pipeline")
        if len(plan.devices) > 1 and self.dice.random() < 0.5:
            plan = await self._plan(min(len(plan.devices), 3), "tensor")
        async with await cluster.load(
            self.path,
            dtype=dtype,
            plan=plan,
            context_tokens=min(1024, 256 + 2 * self.given.new_tokens),
            concurrency=requests,
            batch_invariant=requests > 1,
            standby=self.given.standby,
        ) as model:
            asked = self._asked(requests)
            undisturbed = await asked.replies(model)
            for made in undisturbed:
                if made.error is not None:
                    raise edge.EdgeError(f"without any fault: {made.error}")
            alone = 0
            while faults and alone < _MOST_ALONE:
                await self._one(dtype, model, asked, undisturbed)
                faults -= 1
                alone += self.records[-1].devices == 1
                if self.records[-1].lost:
                    break  # its model has ended
        credentials = cluster.peers[0].credentials
        left = await self.watch.left(
            [relay.address for relay in self.relays.values()],
            [process.pid for process in self.fleet.processes.values()],
            credentials,
        )
        for relay in self.relays.values():
            relay.end_vanished()
        left += await self.watch.left((), [os.getpid()], credentials)
        for each in left:
            click.echo(f"left behind: {each}", err=True)
        self.left += left

    def _injection(self, used: Sequence[str]) -> Injection:
        """Anything that may happen to a plan on these peers, on one of them."""
        spares = [name for name in self.relays if name not in used]
        may = [
            kind
            for kind in self.given.kinds
            if applies(
                kind,
                plan_devices=len(used),
                spares=len(spares),
                has_small_disks=self.has_small_disks,
            )
        ] or ["killed"]  # it changes the plan
        (kind,) = self.dice.choices(may, [WEIGHTS[kind] for kind in may])
        return Injection(
            kind,
            self.dice.choice(used),
            fleet=self.fleet,
            relays=self.relays,
            spares=self.dice.sample(spares, len(spares)),
            plan_devices=len(used),
            dice=self.dice,
        )

    async def _one(
        self, dtype: Dtype, model: edge.AsyncModel, asked: Asked, undisturbed: list[Made]
    ) -> None:
        by_address = {relay.address: name for name, relay in self.relays.items()}
        used = [by_address[model.peers[device].address] for device in model.plan.devices]
        injection = self._injection(used)
        at_token = self.dice.randrange(1, self.given.new_tokens)
        before = len(model.recoveries)
        await injection.prepare()
        made = await asked.replies(model, at_token=at_token, fault=injection.happen)
        recoveries = model.recoveries[before:]
        await injection.mend()
        repair = model.proposal.repair
        is_cut = repair is not None and not repair.same_sums and dtype != "float32"
        what = (
            f"{dtype} {self.given.place}, {injection.kind} {injection.victim} of "
            f"{'/'.join(used)} at {at_token}, {len(made)} at once"
        )
        differ = 0
        for each, one in zip(made, undisturbed, strict=True):
            if each.error is not None:
                click.echo(f"LOST: {what}: {each.error}", err=True)
            elif each.tokens != one.tokens:
                differ += 1
                pairs = zip(each.tokens, one.tokens, strict=True)
                first = next(index for index, (a, b) in enumerate(pairs) if a != b)
                method = "nothing" if repair is None else repair.method
                click.echo(
                    f"DIFFERENT: {what}, repaired by {method}, same sums: {not is_cut}: from token "
                    f"{first} on",
                    err=True,
                )
        record = Record(
            dtype=dtype,
            kind=injection.kind,
            place=self.given.place,
            requests=len(made),
            new_tokens=self.given.new_tokens,
            devices=len(used),
            lost=sum(each.error is not None for each in made),
            different=0 if is_cut else differ,
            different_by_cut=differ if is_cut else 0,
            pause_s=max(each.pause_s for each in made),
            recovered=bool(recoveries),
        )
        self.records.append(record)
        if self.given.verbose:
            reasons = "; ".join(each.reason for each in recoveries)
            click.echo(f"{what}: {record.pause_s:.2f} s; {reasons}", err=True)


def _streamed(plan: Plan) -> Plan:
    """With every layer read from disk for each step, where a stage has enough of them."""
    stages = tuple(
        replace(
            stage,
            shards=tuple(
                replace(shard, streamed_layers=len(stage.layers)) for shard in stage.slices
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


@contextlib.contextmanager
def _small_disks(folders: Sequence[Path]) -> Iterator[bool]:
    """A small file system at each folder, where this user may mount one; whether that is so."""
    with contextlib.ExitStack() as stack:
        is_so = True
        for folder in folders:
            folder.mkdir()
            options = f"size={_CACHE_BYTES}"
            with contextlib.suppress(FileNotFoundError):
                mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
                if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
                    continue
            is_so = False
        yield is_so


@contextlib.contextmanager
def _bed(names: Sequence[str], place: Place) -> Iterator[tuple[Fleet, dict[str, Relay], bool]]:
    """Peers, a relay before each, and whether their caches have disks of their own."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {}
        if place == "disk":
            options = {name: (*_DISK_OPTIONS, f"{folder / f'kv-{name}'}:64MiB") for name in names}
        are_small = stack.enter_context(_small_disks([folder / name for name in names]))
        fleet = stack.enter_context(Fleet(names, folder, options=options))
        relays = {
            name: stack.enter_context(Relay(address)) for name, address in fleet.addresses.items()
        }
        yield fleet, relays, are_small


async def _inject(injector: Injector) -> None:
    given, started_s = injector.given, time.monotonic()
    addresses = [relay.address for relay in injector.relays.values()]
    async with await edge.AsyncCluster.connect(addresses) as cluster:
        while (done := len(injector.records)) < given.faults:
            drawn = injector.dice.choice(given.dtypes), injector.dice.choice(given.requests)
            await injector.rounds(cluster, *drawn, min(given.each, given.faults - done))
            if given.record is not None:
                with given.record.open("a", encoding="utf-8") as file:
                    for made in injector.records[done:]:
                        file.write(json.dumps(asdict(made)) + "\n")
            grown = max(injector.watch.growth_bytes(), default=0) / (1 << 20)
            click.echo(
                f"{len(injector.records)} of {given.faults} in {time.monotonic() - started_s:.0f} "
                f"s; left behind: {len(injector.left)}; memory of processes grew by {grown:.0f} "
                "MiB at most",
                err=True,
            )


@case.case(
    "a reply while a peer is lost",
    case.number("--faults", 40, least=0),
    case.number("--each", 8, "Of a load."),
    click.option("--dtype", "dtypes", multiple=True, default=("float32", "int4")),
    click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS),
    click.option("--requests", type=int, multiple=True, default=(1, 3, 8), show_default=True),
    click.option("--peers", type=click.IntRange(2, len(_NAMES)), default=5, show_default=True),
    case.number("--new-tokens", 60, least=8),
    click.option("--shape", help="A made-up model instead of the bundled one."),
    case.choice("--standby", get_args(Standby), "none"),
    case.choice("--place", get_args(Place), "memory"),
    click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="JSON lines."),
    click.option("--seed", default=0, show_default=True),
    click.option("--verbose", is_flag=True, help="Say a line of each fault."),
    case.FOLDER,
)
def faults(given: Given) -> Iterator[Found]:
    """Replies that were lost or different, and pauses, by kind of fault.

    Some peers on this machine, of which one or more run a plan that was drawn; every connection
    leads through a relay. Replies are made undisturbed first. Then the same replies are asked for
    again, and at a random token something happens to a random peer of the plan. After each model it
    is checked that nothing is left of it.

    With --record a long run may be made in parts: what is told, and appended to the results, is of
    all that the file has; --faults 0 adds nothing to it. It fails where a reply was lost, has other
    tokens than undisturbed, or something was left behind.
    """
    made: Sequence[Record] = ()
    left: Sequence[str] = ()
    if given.faults:
        with _bed(_NAMES[: given.peers], given.place) as (fleet, relays, are_small):
            injector = Injector(
                fleet=fleet,
                relays=relays,
                has_small_disks=are_small,
                path=given.path if given.shape else MODEL,
                dice=random.Random(given.seed),
                given=given,
            )
            asyncio.run(_inject(injector))
        made, left = injector.records, injector.left
    if given.record is not None:
        lines = given.record.read_text(encoding="utf-8").splitlines()
        made = [Record(**json.loads(line)) for line in lines]
    bad = sum(each.lost + each.different for each in made)
    told = [f"{bad} replies were lost or have other tokens; left behind: {len(left)}"]
    kinds = [kind for kind in KINDS if any(each.kind == kind for each in made)]
    for kind in kinds:
        found = [each for each in made if each.kind == kind]
        dtypes, places, new_tokens, requests = (
            "/".join(map(str, sorted({getattr(each, name) for each in found}, key=str)))
            for name in ("dtype", "place", "new_tokens", "requests")
        )
        yield Found(
            figures=_figures(found),
            variant=f"{kind}, {dtypes}, {places}, peers of 1 thread behind relays, {new_tokens} "
            f"tokens, {requests} at once, standby {given.standby}",
            link="TCP over loopback, through a relay",
            model=given.shape or "the bundled model",
            bad=told if kind == kinds[-1] and (bad or left) else (),
        )


def _figures(found: Sequence[Record]) -> Figures:
    figures = Figures()
    figures.add("faults", "faults", len(found))
    for name, count in {
        "replies": sum(each.requests for each in found),
        "replies lost": sum(each.lost for each in found),
        "replies with other tokens": sum(each.different for each in found),
        "replies with other tokens, cut anew": sum(each.different_by_cut for each in found),
    }.items():
        figures.add(name, "replies", count)
    pauses_s = [each.pause_s for each in found]
    figures.add("pause", "s", *pauses_s)
    figures.add("pause, 95th percentile", "s", float(np.percentile(pauses_s, 95)))
    return figures
