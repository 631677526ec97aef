"""Replies while peers are killed, stopped, cut off: are they the same, and how long is the pause?

python -m edge.demos.bench.faults --faults 40
python -m edge.demos.bench.faults --faults 200 --seed 7 --record faults.jsonl
python -m edge.demos.bench.faults --faults 0 --record faults.jsonl --append
python -m edge.demos.bench.faults --shape W --dtype int4 --kind killed --requests 1 --faults 5

Some peers on this machine, of which one or more run a plan that was drawn; every connection leads
through a relay. Replies are made undisturbed first. Then the same replies are asked for again, and
at a random token something happens to a random peer of the plan. After each model it is checked
that nothing is left of it. With --record a long run may be made in parts: what is told, and
appended to the results, is of all that the file has. It fails where a reply was lost, has other
tokens than undisturbed, or something was left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.fault_kinds import KINDS, WEIGHTS, Injection, Kind, applies
from edge.demos.bench.left_behind import Watch
from edge.demos.bench.options import append_option, folder_option
from edge.demos.bench.results import Metric
from edge.demos.bundled import MODEL, STORY
from edge.demos.fleet import Fleet
from edge.demos.relay import Relay
from edge.demos.shapes import checkpoint
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
    """Likewise, but of a quantised model whose slices were cut anew: those may differ."""
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
    model: edge.AsyncModel, asked: Asked, *, at_token: int = 0, fault: Callable[[], None] | None
) -> list[Made]:
    """All at once. `fault` is called once the first has `at_token` tokens."""
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
    relays: Mapping[str, Relay]
    cluster: edge.AsyncCluster
    path: Path
    dice: random.Random
    kinds: Sequence[Kind]
    new_tokens: int
    standby: Standby
    place: Place
    has_small_disks: bool
    verbose: bool = False
    watch: Watch = field(default_factory=Watch)
    records: list[Record] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was left behind after a model, in words."""

    async def plan(self, count: int, how: str) -> Plan:
        """A plan over `count` peers, as the planner divides the model."""
        names = self.dice.sample(list(self.relays), min(count, len(self.relays)))
        async with await edge.AsyncCluster.connect(
            [self.relays[name].address for name in names]
        ) as some:
            proposal = await some.propose(self.path, plan=how, measure="nothing")  # type: ignore[arg-type]
        plan = proposal.plan
        return streamed(plan) if self.place == "disk" else plan

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

    async def rounds(self, dtype: Dtype, requests: int, faults: int) -> None:
        """One load, and `faults` faults while it runs."""
        plan = await self.plan(self.dice.choice([2, 2, 3, 4]), "pipeline")
        if len(plan.devices) > 1 and self.dice.random() < 0.5:
            plan = await self.plan(min(len(plan.devices), 3), "tensor")
        async with await self.cluster.load(
            self.path,
            dtype=dtype,
            plan=plan,
            context_tokens=min(1024, 256 + 2 * self.new_tokens),
            concurrency=requests,
            batch_invariant=requests > 1,
            standby=self.standby,
        ) as model:
            asked = self.asked(requests)
            undisturbed = await replies(model, asked, fault=None)
            for made in undisturbed:
                if made.error is not None:
                    raise edge.EdgeError(f"without any fault: {made.error}")
            alone = 0
            while faults and alone < _MOST_ALONE:
                await self.one(dtype, model, asked, undisturbed)
                faults -= 1
                alone += self.records[-1].devices == 1
                if self.records[-1].lost:
                    break  # its model has ended
        credentials = self.cluster.peers[0].credentials
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

    async def one(
        self, dtype: Dtype, model: edge.AsyncModel, asked: Asked, undisturbed: list[Made]
    ) -> None:
        by_address = {relay.address: name for name, relay in self.relays.items()}
        names = {id: by_address[peer.address] for id, peer in model.peers.items()}
        used = [names[device] for device in model.plan.devices]
        spares = [name for name in self.relays if name not in used]
        may = [
            kind
            for kind in self.kinds
            if applies(
                kind,
                plan_devices=len(used),
                spares=len(spares),
                has_small_disks=self.has_small_disks,
            )
        ]
        if not may:
            may = ["killed"]  # it changes the plan
        (kind,) = self.dice.choices(may, [WEIGHTS.get(kind, 1.0) for kind in may])
        injection = Injection(
            kind,
            self.dice.choice(used),
            fleet=self.fleet,
            relays=self.relays,
            spares=self.dice.sample(spares, len(spares)),
            plan_devices=len(used),
            dice=self.dice,
        )
        at_token = self.dice.randrange(1, self.new_tokens)
        before = len(model.recoveries)
        await injection.prepare()
        made = await replies(model, asked, at_token=at_token, fault=injection.happen)
        recoveries = model.recoveries[before:]
        await injection.mend()
        repair = model.proposal.repair
        is_cut = repair is not None and not repair.same_sums and dtype != "float32"
        differ = sum(
            each.error is None and each.tokens != one.tokens
            for each, one in zip(made, undisturbed, strict=True)
        )
        what = (
            f"{dtype} {self.place}, {kind} {injection.victim} of {'/'.join(used)} at {at_token}, "
            f"{len(made)} at once"
        )
        for each, one in zip(made, undisturbed, strict=True):
            if each.error is not None:
                click.echo(f"LOST: {what}: {each.error}", err=True)
            elif each.tokens != one.tokens:
                pairs = zip(each.tokens, one.tokens, strict=True)
                first = next(index for index, (a, b) in enumerate(pairs) if a != b)
                click.echo(
                    f"DIFFERENT: {what}, repaired by "
                    f"{repair.method if repair is not None else 'nothing'}, same sums: "
                    f"{not is_cut}: from token {first} on",
                    err=True,
                )
        self.records.append(
            Record(
                dtype=dtype,
                kind=kind,
                place=self.place,
                requests=len(made),
                new_tokens=self.new_tokens,
                devices=len(used),
                lost=sum(each.error is not None for each in made),
                different=0 if is_cut else differ,
                different_by_cut=differ if is_cut else 0,
                pause_s=max(each.pause_s for each in made),
                recovered=bool(recoveries),
            )
        )
        if self.verbose:
            reasons = "; ".join(each.reason for each in recoveries)
            click.echo(f"{what}: {self.records[-1].pause_s:.2f} s; {reasons}", err=True)


def streamed(plan: Plan) -> Plan:
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
def small_disks(folders: Sequence[Path]) -> Iterator[bool]:
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
def bed(
    names: Sequence[str], folder: Path, place: Place
) -> Iterator[tuple[Fleet, Mapping[str, Relay], bool]]:
    """Peers, a relay before each, and whether their caches have disks of their own."""
    options = {}
    if place == "disk":
        options = {name: (*_DISK_OPTIONS, f"{folder / f'kv-{name}'}:64MiB") for name in names}
    with (
        small_disks([folder / name for name in names]) as are_small,
        Fleet(names, folder, options=options) as fleet,
        contextlib.ExitStack() as stack,
    ):
        relays = {
            name: stack.enter_context(Relay(address)) for name, address in fleet.addresses.items()
        }
        yield fleet, relays, are_small


async def run(
    injector: Injector,
    dtypes: Sequence[Dtype],
    requests: Sequence[int],
    faults: int,
    each: int,
    keep: Callable[[Sequence[Record]], None],
) -> None:
    started_s = time.monotonic()
    while (done := len(injector.records)) < faults:
        count = min(each, faults - done)
        await injector.rounds(injector.dice.choice(dtypes), injector.dice.choice(requests), count)
        keep(injector.records[done:])
        click.echo(
            f"{len(injector.records)} of {faults} in {time.monotonic() - started_s:.0f} s; left "
            f"behind: {len(injector.left)}; memory of processes grew by "
            f"{max(injector.watch.growth_bytes(), default=0) / (1 << 20):.0f} MiB at most",
            err=True,
        )


@click.command()
@click.option("--faults", type=click.IntRange(0), default=40, show_default=True)
@click.option("--each", type=click.IntRange(1), default=8, show_default=True, help="Of a load.")
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "int4"), show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS)
@click.option("--requests", type=int, multiple=True, default=(1, 3, 8), show_default=True)
@click.option("--peers", type=click.IntRange(2, len(_NAMES)), default=5, show_default=True)
@click.option("--new-tokens", type=click.IntRange(8), default=60, show_default=True)
@click.option("--shape", help="A made-up model instead of the bundled one.")
@click.option("--standby", type=click.Choice(get_args(Standby)), default="none")
@click.option("--place", type=click.Choice(get_args(Place)), default="memory")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Lines of JSON.")
@click.option("--seed", default=0, show_default=True)
@click.option("--verbose", is_flag=True, help="Say a line of each fault.")
@folder_option
@append_option
def main(
    faults: int,
    each: int,
    dtypes: Sequence[Dtype],
    kinds: Sequence[Kind],
    requests: Sequence[int],
    peers: int,
    new_tokens: int,
    shape: str | None,
    standby: Standby,
    place: Place,
    record: Path | None,
    seed: int,
    verbose: bool,
    folder: Path,
    append: bool,
) -> None:
    """Faults, replies that were lost or different, and pauses, by kind."""
    path = MODEL if shape is None else checkpoint(shape, folder)

    async def measured(fleet: Fleet, relays: Mapping[str, Relay], are_small: bool) -> Injector:
        async with await edge.AsyncCluster.connect(
            [relay.address for relay in relays.values()]
        ) as cluster:
            injector = Injector(
                fleet=fleet,
                relays=relays,
                cluster=cluster,
                path=path,
                dice=random.Random(seed),
                kinds=kinds,
                new_tokens=new_tokens,
                standby=standby,
                place=place,
                has_small_disks=are_small,
                verbose=verbose,
            )
            await run(injector, dtypes, requests, faults, each, keep)
        return injector

    def keep(records: Sequence[Record]) -> None:
        if record is not None:
            with record.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(each)) + "\n" for each in records)

    made: Sequence[Record] = ()
    left: Sequence[str] = ()
    if faults:
        with (
            tempfile.TemporaryDirectory() as own,
            bed(_NAMES[:peers], Path(own), place) as (fleet, relays, small),
        ):
            injector = asyncio.run(measured(fleet, relays, small))
        made, left = injector.records, injector.left
    if record is not None:
        lines = record.read_text(encoding="utf-8").splitlines()
        made = [Record(**json.loads(line)) for line in lines]
    for kind in KINDS:
        if found := [each for each in made if each.kind == kind]:
            publish(found, kind, standby, shape, append)
    bad = sum(each.lost + each.different for each in made)
    if bad or left:
        raise SystemExit(f"{bad} replies were lost or have other tokens; left behind: {len(left)}")


def publish(
    found: Sequence[Record],
    kind: Kind,
    standby: Standby,
    shape: str | None,
    append: bool,
) -> None:
    """The rows of one kind of fault."""
    counts = {
        "faults": len(found),
        "replies": sum(each.requests for each in found),
        "replies lost": sum(each.lost for each in found),
        "replies with other tokens": sum(each.different for each in found),
        "replies with other tokens, cut anew": sum(each.different_by_cut for each in found),
    }
    metrics = [Metric(name=name, unit=name.split()[0], values=[n]) for name, n in counts.items()]
    pauses_s = [each.pause_s for each in found]
    metrics += [
        Metric(name="pause", unit="s", values=pauses_s),
        Metric(name="pause, 95th percentile", unit="s", values=[p95(pauses_s)]),
    ]
    click.echo(f"\n{kind}")

    def drawn(values: Iterable[object], word: str) -> str:
        return f"{'/'.join(map(str, sorted(set(values), key=str)))} {word}".strip()

    results.publish(
        metrics,
        question="a reply while a peer is lost",
        variant=", ".join(
            [
                kind,
                drawn((each.dtype for each in found), ""),
                drawn((each.place for each in found), ""),
                "peers of 1 thread behind relays",
                drawn((each.new_tokens for each in found), "tokens"),
                drawn((each.requests for each in found), "at once"),
                f"standby {standby}",
            ]
        ),
        link="TCP over loopback, through a relay",
        model="the bundled model" if shape is None else shape,
        keep=append,
    )


def p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95))


if __name__ == "__main__":
    main()
