"""Models larger than memory: Edge, and llama.cpp in turn, in control groups of one limit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

import edge
from edge.demos.bench import case
from edge.demos.bench.case import LOOPBACK, Found, Given
from edge.demos.bench.disk import disk_rate, drop_page_cache
from edge.demos.bench.llama_files import gguf_of
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import in_turn, random_prompt
from edge.demos.control_groups import ControlGroup, remove_groups_of_the_dead
from edge.demos.limited_peer import KERNEL_BYTES, LimitedPeer, limited_peer
from edge.demos.processes import child
from edge.demos.shapes import SHAPES, checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE
from edge.studies import llama_cpp_process

PREFIX = "edgelimit"
"""Prefix of the control groups' names; the owner's process id follows."""

CONTEXT_TOKENS = 64
PROMPT_TOKENS = 8
STORED_BITS = 4.5
"""Bits of a weight: in Q4_0, and in int4-pure with blocks of 128 as it is packed."""

MIB = float(1 << 20)

DISK_SHARE = 0.4
"""Share of the real disk's rate that each of two emulated disks gives: both at once do not fill
it."""

PATIENCE_S = 90.0
"""For one answer: a program that has too little memory may read the same pages for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One model in one limit: what a peer takes without a model, and a share of the weights."""

    name: str
    shape: str
    share: Fraction
    new_tokens: int
    """Tokens of each reply; as many as take a few seconds."""
    is_pair: bool = False
    """Two peers of this size against one, with a disk of its own for each."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights on disk: what budgets are shares of, for every program the same."""
        return int(SHAPES[self.shape].num_parameters * STORED_BITS / 8)

    @property
    def words(self) -> str:
        against = "two such peers against one" if self.is_pair else "in turn with llama.cpp"
        return f"{self.shape}, {self.share} of the weights: {against}"


_QUICK = Limit(name="quick", shape="small", share=Fraction(1, 2), new_tokens=8)

LIMITS = (
    *(
        Limit(
            name=f"{shape}-{share.numerator}-{share.denominator}",
            shape=shape,
            share=share,
            new_tokens=new_tokens,
        )
        for shape, new_tokens in (("W", 16), ("T", 8))
        for share in (Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))
    ),
    Limit(name="E-1-4", shape="E", share=Fraction(1, 4), new_tokens=48),
    # Of the model, both together have room for a quarter.
    Limit(name="E-pair", shape="E", share=Fraction(1, 8), new_tokens=32, is_pair=True),
    Limit(name="W-pair", shape="W", share=Fraction(1, 4), new_tokens=12, is_pair=True),
    _QUICK,
    replace(_QUICK, name="quick-pair", is_pair=True),
)

QUICK = ("quick", "quick-pair")
"""Shows that everything runs; its figures say nothing."""


class Setting:
    """What is the same for all limits."""

    def __init__(self, given: Given, *, threads: int) -> None:
        self.given = given
        self.threads = threads

    @property
    def cache(self) -> Path:
        cache: Path = self.given.folder / "limited"
        return cache

    def load(self, cluster: edge.Cluster, limit: Limit, **options: Any) -> edge.Model:
        """Its peers are measured before, so that its speed is predicted."""
        path = checkpoint(limit.shape, self.given.folder)
        options |= {"dtype": "int4-pure", "block_size": self.given.block_size}
        options |= {"context_tokens": CONTEXT_TOKENS, "speculate": "off"}
        cluster.propose(path, **options)
        return cluster.load(path, **options)

    def group(self, name: str, memory_bytes: int, rate: int | None = None) -> ControlGroup:
        return ControlGroup(
            f"{PREFIX}-{os.getpid()}-{name}",
            memory_bytes=memory_bytes + KERNEL_BYTES,
            disk=self.given.folder,
            read_bytes_per_s=rate,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on peers in their limits."""

    model: edge.Model
    peers: Sequence[LimitedPeer]
    groups: Sequence[ControlGroup] = ()

    def reply(self, new_tokens: int) -> tuple[list[int], float, float]:
        """Tokens, tokens per second after the first, and bytes read from disk for each.

        Reading is over all steps, the prompt's included. A few layers that are read ahead may fall
        into the reply before, or after.
        """
        before = sum(group.bytes_read for group in self.groups)
        ids, seen = [], []
        prompt = random_prompt(self.model, PROMPT_TOKENS, 1)
        for token in self.model.stream(prompt, max_new_tokens=new_tokens, ignore_eos=True):
            ids.append(token.token_id)
            seen.append(time.perf_counter())
        read = sum(group.bytes_read for group in self.groups) - before
        return ids, (len(seen) - 1) / (seen[-1] - seen[0]), read / len(seen)

    def rate(self) -> float | None:
        """Rate of the disk, measured on the file that the peer streams; None if it streams none."""
        try:
            return disk_rate(self.peers[0].streamed_file())
        except LookupError:
            return None


def without_limit(limit: Limit, setting: Setting, figures: Figures) -> tuple[list[int], int]:
    """Tokens of the model without a limit; and the budget: room for the limit's share of the
    weights as stored, the KV cache, and what the peer says that it takes as well."""
    with (
        limited_peer(cache=setting.cache, threads=setting.threads) as peer,
        edge.Cluster.connect([peer.address]) as cluster,
        setting.load(cluster, limit) as model,
    ):
        free = Loaded(model, [peer])
        free.reply(limit.new_tokens)
        ids, speed, _read = free.reply(limit.new_tokens)
        (row,) = model.proposal.rows
        overhead = peer.stated_bytes()
    budget = int(limit.share * limit.stored_bytes) + row.memory.kv_bytes + overhead
    figures.add("decode, Edge without a limit", "tok/s", speed)
    figures.add("weights as stored", "MiB", limit.stored_bytes / MIB)
    figures.add("weights in memory without a limit", "MiB", row.memory.weight_bytes / MIB)
    figures.add("what a peer takes beside them", "MiB", overhead / MIB)
    figures.add("budget", "MiB", budget / MIB)
    return ids, budget


@contextlib.contextmanager
def loaded(
    limit: Limit,
    setting: Setting,
    budget_bytes: int,
    *names: str,
    rate: int | None = None,
    **options: Any,
) -> Iterator[Loaded]:
    """The model on peers whose budget is their --memory; the system ends those that take more."""
    peer = functools.partial(
        limited_peer, cache=setting.cache, memory_bytes=budget_bytes, threads=setting.threads
    )
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(setting.group(n, budget_bytes, rate)) for n in names]
        peers = [
            stack.enter_context(peer(name=name, group=group))
            for name, group in zip(names, groups, strict=True)
        ]
        cluster = stack.enter_context(edge.Cluster.connect([each.address for each in peers]))
        model = stack.enter_context(setting.load(cluster, limit, stream="on", **options))
        yield Loaded(model, peers, groups)


class SideError(Exception):
    """llama.cpp ended, or was too slow to wait for; what it said is above."""


class MappedLlama:
    """llama.cpp over its mapped file, in a group."""

    def __init__(self, process: subprocess.Popen[str], group: ControlGroup) -> None:
        """Raises SideError if it ends instead, as it does where it has too little memory."""
        self._process, self._group = process, group
        self.version = self._answer()["version"]

    def decode(self, new_tokens: int) -> tuple[float, float]:
        """(tokens per second after the first, bytes read for each). SideError if it ends."""
        assert self._process.stdin is not None
        before = self._group.bytes_read
        try:
            self._process.stdin.write(f"{PROMPT_TOKENS} {new_tokens} 1\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideError(str(error)) from error
        decode_s = self._answer()["decode_s"]
        # The prompt reads all weights once, too, and is not in the time.
        return (new_tokens - 1) / decode_s, (self._group.bytes_read - before) / new_tokens

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        impatience = threading.Timer(PATIENCE_S, self._process.kill)
        impatience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            impatience.cancel()
            impatience.join()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise SideError("llama.cpp ended, or was ended, before it answered") from None
        return answer


@contextlib.contextmanager
def mapped_llama(
    python: str, limit: Limit, setting: Setting, budget_bytes: int
) -> Iterator[MappedLlama]:
    gguf = gguf_of(limit.shape, setting.given.folder, python=python)
    drop_page_cache()
    numbers = [str(setting.threads), "64", "1"]
    with setting.group("llama", budget_bytes) as group:
        command = [python, llama_cpp_process.__file__, str(gguf), *numbers, "mapped"]
        with child(group.joined(*command)) as process:
            yield MappedLlama(process, group)


def run_alone(limit: Limit, setting: Setting, figures: Figures) -> str:
    """In turn with llama.cpp, in a group of the same limit; what it was measured with."""
    ids, budget = without_limit(limit, setting, figures)
    python, said = setting.given.llama_python, "no other program"
    drop_page_cache()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(loaded(limit, setting, budget, "one"))
        sides: dict[str, Any] = {"Edge": lambda _number: measured(ours, limit, ids)}
        if python is not None:
            theirs = stack.enter_context(mapped_llama(python, limit, setting, budget))
            tokens = max(4, limit.new_tokens // 4)  # it may take seconds for each
            sides["llama.cpp"] = lambda _number: theirs.decode(tokens)
            said = f"llama-cpp-python {theirs.version} Q4_0 mapped"
        for turn in in_turn(sides, setting.given.rounds):
            for (name, unit), value in turn["Edge"].items():
                figures.add(name, unit, value)
            if "llama.cpp" in turn:
                speed, read = turn["llama.cpp"]
                figures.add("decode, llama.cpp", "tok/s", speed)
                figures.add("llama.cpp reads for a token", "MB", read / 1e6)
                figures.add("Edge / llama.cpp", "ratio", turn["Edge"][SPEED] / speed)
        peak_bytes = ours.peers[0].peak_bytes
    figures.add("peak resident", "MiB", peak_bytes / MIB)
    figures.add("peak resident / budget", "ratio", peak_bytes / budget)
    return said


def run_pair(limit: Limit, setting: Setting, figures: Figures) -> str:
    """Two peers against one; each has one thread, the budget, and a disk of a given rate."""
    ids, budget = without_limit(limit, setting, Figures())
    setting = Setting(setting.given, threads=1)
    with loaded(limit, setting, budget, "one") as one:
        real = one.rate()
    rate = int(DISK_SHARE * real) if real else None
    with (
        loaded(limit, setting, budget, "a", "b", rate=rate, plan="tensor") as pair,
        loaded(limit, setting, budget, "one", rate=rate) as one,
    ):
        # The first round tells, too, which experts are wanted again.
        sides = {
            "one peer": lambda _number: measured(one, limit, ids),
            "two peers": lambda _number: measured(pair, limit, ids),
        }
        for turn in in_turn(sides, setting.given.rounds):
            alone, both = turn["one peer"], turn["two peers"]
            figures.add("decode, one peer", "tok/s", alone[SPEED])
            figures.add("decode, two peers", "tok/s", both[SPEED])
            figures.add("two peers / one", "ratio", both[SPEED] / alone[SPEED])
            figures.add("one peer reads for a token", "MB", alone[READ])
            figures.add("two peers read for a token", "MB", both[READ])
            for key in (PREDICTED, EXPERTS):
                if key in both:
                    figures.add(*key, both[key])
            figures.add(*SAME, alone[SAME])
        for each in (*pair.peers, *one.peers):
            figures.add("peak resident / budget", "ratio", each.peak_bytes / budget)
    return f"tensor, 1 thread each, {f'each disk {rate / 1e6:.0f} MB/s' if rate else 'one disk'}"


SPEED = "decode, Edge", "tok/s"
READ = "read for a token", "MB"
PREDICTED = "decode / predicted", "ratio"
EXPERTS = "experts found in memory", "share"
SAME = "tokens as without a limit", "share"


def measured(ours: Loaded, limit: Limit, expected: list[int]) -> dict[tuple[str, str], float]:
    """Figures of one reply. It is predicted as the replies before it were found to be."""
    model = ours.model
    ids, speed, read = ours.reply(limit.new_tokens)
    found = {SPEED: speed, READ: read / 1e6, SAME: float(ids == expected)}
    predicted = model.predict(prompt_tokens=PROMPT_TOKENS, output_tokens=limit.new_tokens)
    if predicted is not None:
        found[PREDICTED] = speed / predicted.tokens_per_s
    counted = [each.decode for each in model.measure()]
    if experts := sum(each.experts for each in counted):
        found[EXPERTS] = 1 - sum(each.experts_read for each in counted) / experts
    streamed = model.proposal.rows[0].memory.streamed_bytes
    if len(ours.peers) == 1 and streamed and (rate := ours.rate()) is not None:
        found["streamed", "MB"] = streamed / 1e6
        found["read for a token / streamed", "ratio"] = read / streamed
        found["disk, direct reads of the same file", "MB/s"] = rate / 1e6
        found["decode / (disk rate / streamed)", "ratio"] = speed * streamed / rate
    return found


@case.case(
    "bigger than memory, in one limit, in turn",
    click.option("--only", "names", multiple=True, metavar="NAME",
                 type=click.Choice([each.name for each in LIMITS]),
                 help="Run this limit; may be repeated.  [default: all but the quick ones]"),
    click.option("--list", "is_list", is_flag=True, help="Show the limits and end."),
    click.option("--llama-python", help="A Python with llama-cpp-python and gguf."),
    case.rounds(3),
    case.number("--threads", 2),
    case.block_size(128),
    case.FOLDER,
)  # fmt: skip
def bigger_than_memory(given: Given) -> Iterator[Found]:
    """Tokens per second, memory and reading, in budgets smaller than the weights.

    Needs root on Linux, for control groups. Without --llama-python, Edge is measured alone.
    """
    wanted = given.names or {each.name for each in LIMITS} - {*QUICK}
    limits = [each for each in LIMITS if each.name in wanted]
    if given.is_list:
        for limit in limits:
            click.echo(f"{limit.name:<10} {limit.words}")
        return
    setting = Setting(given, threads=given.threads)
    os.environ[CACHE_VARIABLE] = str(setting.cache)
    try:
        remove_groups_of_the_dead(PREFIX)
        with setting.group("try", 1 << 30):
            pass
    except OSError as error:
        raise click.ClickException(f"no control groups can be made here: {error}") from None
    for limit in limits:
        figures, bad = Figures(), []
        try:
            said = (run_pair if limit.is_pair else run_alone)(limit, setting, figures)
        except (edge.EdgeError, SideError, OSError) as error:
            said, bad = "failed", [f"{limit.name}: {error}"]
        yield Found(
            figures=figures,
            variant=f"{limit.name}: int4-pure/{given.block_size}, {setting.threads} threads; "
            f"{said}",
            link=LOOPBACK if limit.is_pair else "none",
            model=described(limit.shape),
            keep=not bad,
            bad=bad,
        )
