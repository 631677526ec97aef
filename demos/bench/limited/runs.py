"""One case at a time: peers in limits, replies in turn with other programs, what it all took."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import edge
from edge.demos.bench.disk import disk_rate, drop_page_cache
from edge.demos.bench.limited import lends_nothing
from edge.demos.bench.limited.cases import Case
from edge.demos.bench.limited.sides import (
    PROMPT_TOKENS,
    Side,
    SideError,
    accelerate,
    gguf_of,
    llama,
)
from edge.demos.bench.results import Figures, Metric
from edge.demos.control_groups import ControlGroup
from edge.demos.limited_peer import KERNEL_BYTES, LimitedPeer, limited_peer
from edge.demos.shapes import checkpoint
from edge.partition import Plan

PREFIX = "edgelimit"
"""Prefix of the control groups' names; the owner's process id follows."""

MIB = float(1 << 20)

DISK_SHARE = 0.4
"""Share of the real disk's rate that each of two emulated disks gives: both at once do not fill
it."""

ACCELERATE_TOKENS = 3
ACCELERATE_LIMITS = (1, 2, 4, 8)
"""Times the limit of the others, if it cannot run in less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for all cases."""

    folder: Path
    rounds: int
    threads: int
    block_size: int
    """Block size of int4-pure weights."""
    llama_python: str | None

    @property
    def cache(self) -> Path:
        return self.folder / "limited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    token_ids: tuple[int, ...]
    tokens_per_s: float
    bytes_per_token: float
    """Read from disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roomy:
    """The model without a limit: what it says, and what it takes."""

    token_ids: tuple[int, ...]
    tokens_per_s: float
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    """What the peer says that it takes as well: the process, and buffers for this model."""
    plan: Plan

    def budget_bytes(self, case: Case) -> int:
        """Room for the case's share of the weights as stored, the KV cache and the process; or what
        the case says."""
        if case.budget_bytes is not None:
            return case.budget_bytes
        return int(case.share * case.stored_bytes) + self.kv_bytes + self.overhead_bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on one peer in its limit."""

    peer: LimitedPeer
    group: ControlGroup
    model: edge.Model

    def reply(self, new_tokens: int) -> Reply:
        return reply(self.model, new_tokens, [self.group])


def reply(model: edge.Model, new_tokens: int, groups: list[ControlGroup]) -> Reply:
    """Speed between the first and the last token; reading over all steps, the prompt's included.

    A few layers that are read ahead may fall into the reply before, or the one after.
    """
    before = sum(group.bytes_read for group in groups)
    ids, seen = [], []
    for token in model.stream(prompt_of(model), max_new_tokens=new_tokens, ignore_eos=True):
        ids.append(token.token_id)
        seen.append(time.perf_counter())
    read = sum(group.bytes_read for group in groups) - before
    return Reply(
        token_ids=tuple(ids),
        tokens_per_s=(len(seen) - 1) / (seen[-1] - seen[0]),
        bytes_per_token=read / len(seen),
    )


def prompt_of(model: edge.Model) -> list[int]:
    return np.random.default_rng(1).integers(model.vocab_size, size=PROMPT_TOKENS).tolist()  # type: ignore[no-any-return]


def load(cluster: edge.Cluster, case: Case, setting: Setting, **options: Any) -> edge.Model:
    """Its peers are measured before, so that its speed is predicted."""
    path = checkpoint(case.shape, setting.folder)
    options |= {"dtype": case.dtype, "block_size": setting.block_size}
    options |= {"context_tokens": case.context_tokens}
    cluster.propose(path, **options)
    return cluster.load(path, **options)


def roomy(case: Case, setting: Setting) -> Roomy:
    """Runs the case's model on a peer without a limit."""
    with (
        limited_peer(cache=setting.cache, threads=setting.threads) as peer,
        edge.Cluster.connect([peer.address]) as cluster,
        load(cluster, case, setting) as model,
    ):
        reply(model, case.new_tokens, [])
        found = model.generate(prompt_of(model), max_new_tokens=case.new_tokens, ignore_eos=True)
        (row,) = model.proposal.rows
        return Roomy(
            token_ids=found.token_ids,
            tokens_per_s=found.tokens_per_s,
            weight_bytes=row.memory.weight_bytes,
            kv_bytes=row.memory.kv_bytes,
            overhead_bytes=peer.stated_bytes(),
            plan=model.plan,
        )


@contextlib.contextmanager
def loaded(
    case: Case,
    setting: Setting,
    *,
    budget_bytes: int,
    plan: Plan | None = None,
    name: str = "one",
    read_bytes_per_s: int | None = None,
    program: str = "edge",
) -> Iterator[Loaded]:
    """The model on a peer whose budget is its --memory; the system ends it should it take more."""
    with (
        _group(name, setting, budget_bytes, read_bytes_per_s) as group,
        limited_peer(
            cache=setting.cache,
            memory_bytes=budget_bytes,
            threads=setting.threads,
            name=name,
            group=group,
            program=program,
        ) as peer,
        edge.Cluster.connect([peer.address]) as cluster,
        load(cluster, case, setting, plan=plan or "auto", stream="on") as model,
    ):
        yield Loaded(peer, group, model)


def run_alone(case: Case, setting: Setting) -> tuple[list[Metric], str]:
    """In turn with llama.cpp and Accelerate, each in a group of the same limit."""
    figures = Figures()
    free = roomy(case, setting)
    budget = free.budget_bytes(case)
    figures.add("decode, Edge without a limit", "tok/s", free.tokens_per_s)
    figures.add("weights as stored", "MiB", case.stored_bytes / MIB)
    figures.add("weights in memory without a limit", "MiB", free.weight_bytes / MIB)
    figures.add("what a peer takes beside them", "MiB", free.overhead_bytes / MIB)
    figures.add("budget", "MiB", budget / MIB)
    said = "no other program"
    drop_page_cache()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(loaded(case, setting, budget_bytes=budget))
        theirs: Side | None = None
        if setting.llama_python is not None:
            gguf = gguf_of(case.shape, setting.folder, python=setting.llama_python)
            drop_page_cache()
            group = stack.enter_context(_group("llama", setting, budget))
            theirs = stack.enter_context(
                llama(setting.llama_python, gguf, group, threads=setting.threads)
            )
            said = f"llama-cpp-python {theirs.hello['version']} Q4_0 mapped"
        for number in range(setting.rounds + 1):
            _round(figures if number else Figures(), case, free, ours, theirs)
        figures.add("peak resident", "MiB", ours.peer.peak_bytes / MIB)
        figures.add("peak resident / budget", "ratio", ours.peer.peak_bytes / budget)
    if setting.llama_python is not None:
        said += _against_accelerate(figures, case, setting, budget)
    return figures.metrics(), said


def run_pair(case: Case, setting: Setting) -> tuple[list[Metric], str]:
    """Two peers against one; each has one thread, the budget, and a disk of a given rate."""
    figures = Figures()
    free = roomy(case, setting)
    budget = free.budget_bytes(case)
    setting = dataclasses.replace(setting, threads=1)
    with loaded(case, setting, budget_bytes=budget) as one:
        real = _rate(one.peer)
    rate = int(DISK_SHARE * real) if real else None
    peer = functools.partial(limited_peer, cache=setting.cache, memory_bytes=budget, threads=1)
    with (
        _group("a", setting, budget, rate) as a,
        _group("b", setting, budget, rate) as b,
        peer(name="a", group=a) as first,
        peer(name="b", group=b) as second,
        edge.Cluster.connect([first.address, second.address]) as cluster,
        load(cluster, case, setting, plan="tensor", stream="on") as pair,
        loaded(case, setting, budget_bytes=budget, read_bytes_per_s=rate) as one,
    ):
        for number in range(setting.rounds + 1):
            alone = one.reply(case.new_tokens)
            both = reply(pair, case.new_tokens, [a, b])
            # The first round tells, too, which experts are wanted again.
            _against_prediction(figures if number else Figures(), case, pair, both)
            if number:
                figures.add("decode, one peer", "tok/s", alone.tokens_per_s)
                figures.add("decode, two peers", "tok/s", both.tokens_per_s)
                figures.add("two peers / one", "ratio", both.tokens_per_s / alone.tokens_per_s)
                figures.add("one peer reads for a token", "MB", alone.bytes_per_token / 1e6)
                figures.add("two peers read for a token", "MB", both.bytes_per_token / 1e6)
                figures.add("tokens as without a limit", "share", _same(alone, free))
        for each in (first, second, one.peer):
            figures.add("peak resident / budget", "ratio", each.peak_bytes / budget)
    disk = f"each disk {rate / 1e6:.0f} MB/s" if rate else "one disk"
    return figures.metrics(), f"tensor, 1 thread each, {disk}"


def run_window(case: Case, setting: Setting) -> tuple[list[Metric], str]:
    """What fits stays in memory, against all layers going through a window (as TPI-LLM does)."""
    figures = Figures()
    free = roomy(case, setting)
    budget, streamed = free.budget_bytes(case), all_streamed(free.plan)
    int4 = dataclasses.replace(case, dtype="int4-pure")
    with (
        loaded(case, setting, name="kept", budget_bytes=budget) as kept,
        loaded(case, setting, name="window", plan=streamed, budget_bytes=budget) as window,
        loaded(int4, setting, name="int4", budget_bytes=budget) as rounded,
    ):
        for number in range(setting.rounds + 1):
            replies = [each.reply(case.new_tokens) for each in (kept, window, rounded)]
            if number:
                mine, theirs, small = (each.tokens_per_s for each in replies)
                figures.add("decode, what fits stays", "tok/s", mine)
                figures.add("decode, all layers through a window", "tok/s", theirs)
                figures.add("what fits stays / window", "ratio", mine / theirs)
                figures.add("decode, int4 in the same limit", "tok/s", small)
                figures.add("int4 / window", "ratio", small / theirs)
                for reply in replies[:2]:
                    figures.add("tokens as without a limit", "share", _same(reply, free))
        for each in (kept, window, rounded):
            figures.add("peak resident / budget", "ratio", each.peer.peak_bytes / budget)
    return figures.metrics(), "float32"


def run_lending(case: Case, setting: Setting) -> tuple[list[Metric], str]:
    """A peer as it is, and one that leaves idle what steps leave unused, in turn."""
    figures = Figures()
    free = roomy(case, setting)
    budget = free.budget_bytes(case)
    idle = lends_nothing.__name__
    with (
        loaded(case, setting, name="lends", budget_bytes=budget) as lends,
        loaded(case, setting, name="idle", budget_bytes=budget, program=idle) as keeps,
    ):
        for number in range(setting.rounds + 1):
            mine, other = (each.reply(case.new_tokens) for each in (lends, keeps))
            _against_prediction(figures if number else Figures(), case, lends.model, mine)
            if number:
                figures.add("decode, unused memory lent", "tok/s", mine.tokens_per_s)
                figures.add("decode, unused memory idle", "tok/s", other.tokens_per_s)
                figures.add("lent / idle", "ratio", mine.tokens_per_s / other.tokens_per_s)
                figures.add("read for a token, lent", "MB", mine.bytes_per_token / 1e6)
                figures.add("read for a token, idle", "MB", other.bytes_per_token / 1e6)
                rate = _rate(lends.peer)
                if rate is not None:
                    figures.add("disk, direct reads of the same file", "MB/s", rate / 1e6)
                    used = mine.tokens_per_s * mine.bytes_per_token / rate
                    figures.add("lent: read / what the disk gives", "ratio", used)
                for reply in (mine, other):
                    figures.add("tokens as without a limit", "share", _same(reply, free))
        for each in (lends, keeps):
            figures.add("peak resident / budget", "ratio", each.peer.peak_bytes / budget)
    return figures.metrics(), "in turn"


def all_streamed(plan: Plan) -> Plan:
    """A plan for one device with every layer on disk. Its device goes by name, then by any."""
    (stage,) = plan.stages
    (shard,) = stage.slices
    shard = dataclasses.replace(shard, device="window", streamed_layers=len(stage.layers))
    return dataclasses.replace(plan, stages=(dataclasses.replace(stage, shards=(shard,)),))


def _round(figures: Figures, case: Case, free: Roomy, ours: Loaded, theirs: Side | None) -> None:
    mine = ours.reply(case.new_tokens)
    figures.add("decode, Edge", "tok/s", mine.tokens_per_s)
    _against_prediction(figures, case, ours.model, mine)
    figures.add("tokens as without a limit", "share", _same(mine, free))
    streamed = ours.model.proposal.rows[0].memory.streamed_bytes
    rate = _rate(ours.peer)
    if streamed and rate is not None:
        figures.add("streamed", "MB", streamed / 1e6)
        figures.add("read for a token", "MB", mine.bytes_per_token / 1e6)
        figures.add("read for a token / streamed", "ratio", mine.bytes_per_token / streamed)
        figures.add("disk, direct reads of the same file", "MB/s", rate / 1e6)
        figures.add("decode / (disk rate / streamed)", "ratio", mine.tokens_per_s * streamed / rate)
    if theirs is not None:
        other, read = theirs.decode(case.others_tokens)
        figures.add("decode, llama.cpp", "tok/s", other)
        figures.add("llama.cpp reads for a token", "MB", read / 1e6)
        figures.add("Edge / llama.cpp", "ratio", mine.tokens_per_s / other)


def _against_prediction(figures: Figures, case: Case, model: edge.Model, found: Reply) -> None:
    """And how many of the experts that it went through were in memory, where there are some.

    Predicted is it as the replies before it were found to be.
    """
    predicted = model.predict(prompt_tokens=PROMPT_TOKENS, output_tokens=case.new_tokens)
    if predicted is not None:
        ratio = found.tokens_per_s / predicted.tokens_per_s
        figures.add("decode / predicted", "ratio", ratio)
    counted = [each.decode for each in model.measure()]
    experts = sum(each.experts for each in counted)
    if experts:
        read = sum(each.experts_read for each in counted)
        figures.add("experts found in memory", "share", 1 - read / experts)


def _against_accelerate(figures: Figures, case: Case, setting: Setting, budget: int) -> str:
    """In the same limit, or in the first multiple of it in which it runs at all."""
    ours = median(figures.values["decode, Edge", "tok/s"])
    assert setting.llama_python is not None
    for times in ACCELERATE_LIMITS:
        drop_page_cache()
        limit = times * budget
        try:
            with (
                _group("accelerate", setting, limit) as group,
                accelerate(
                    setting.llama_python,
                    checkpoint(case.shape, setting.folder),
                    group,
                    threads=setting.threads,
                    limit_bytes=limit,
                ) as theirs,
            ):
                speed, _read = theirs.decode(ACCELERATE_TOKENS)
        except SideError:
            continue
        where = "" if times == 1 else f" in {times} times the limit"
        figures.add(f"decode, Accelerate bfloat16{where}", "tok/s", speed)
        figures.add(f"Edge / Accelerate{where}", "ratio", ours / speed)
        on_disk = theirs.hello["on_disk"]
        return f"; accelerate {theirs.hello['version']} with {on_disk} layers on disk"
    return "; Accelerate does not run in this limit"


def _same(found: Reply, expected: Roomy) -> float:
    """1 if the tokens are those of the model in memory, else 0."""
    return float(found.token_ids == expected.token_ids)


def _rate(peer: LimitedPeer) -> float | None:
    """Rate of the disk, measured on the file that the peer streams; None if it streams nothing."""
    try:
        return disk_rate(peer.streamed_file())
    except LookupError:
        return None


def _group(
    name: str, setting: Setting, memory_bytes: int, read_bytes_per_s: int | None = None
) -> ControlGroup:
    return ControlGroup(
        f"{PREFIX}-{os.getpid()}-{name}",
        memory_bytes=memory_bytes + KERNEL_BYTES,
        disk=setting.folder,
        read_bytes_per_s=read_bytes_per_s,
    )
