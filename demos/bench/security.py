"""What keys and encryption cost: the same peers with and without them, in turn."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import compared, in_turn, random_prompt
from edge.demos.fleet import Fleet
from edge.demos.shapes import SHAPES, checkpoint
from edge.host.cache_paths import CACHE_VARIABLE
from edge.partition import Plan, Shard, Stage, split_by_shares

PLAIN = "insecure"
KINDS = {PLAIN: ("--insecure",), "one host": (), "two hosts": ("--listen", "127.0.0.2:0")}
"""Options of `edge peer`. A caller of 127.0.0.2 comes from 127.0.0.1, and takes it for another
host."""
DEVICES = ("local-1", "local-2")
ROUNDS_OF_A_LOAD = 4
"""After one that warms up."""


def _halves(name: str, block_size: int) -> Plan:
    """The named shape in one stage, each device with an equal part of every layer."""
    shape = SHAPES[name]
    cuts = (
        split_by_shares(count, [1] * len(DEVICES), size)
        for count, size in (
            (shape.num_heads, 1), (shape.ffn_columns, block_size), (shape.vocab_size, 1)
        )
    )  # fmt: skip
    shards = tuple(
        Shard(device=device, heads=heads, ffn_columns=columns, vocab=vocab)
        for device, heads, columns, vocab in zip(DEVICES, *cuts, strict=True)
    )
    stage = Stage(layers=range(shape.num_layers), shards=shards)
    return Plan(model=name, version=1, stages=(stage,))


@contextlib.contextmanager
def _two_peers(kind: str, folder: Path) -> Iterator[edge.Cluster]:
    """Which keep their weights in the folder."""
    options = dict.fromkeys(DEVICES, KINDS[kind])
    with (
        Fleet(DEVICES, folder, options=options) as fleet,
        edge.Cluster.connect(list(fleet.addresses.values()), insecure=kind == PLAIN) as cluster,
    ):
        yield cluster


def _start_s(is_insecure: bool, _number: int) -> float:
    """Until two peers have started."""
    begin_s = time.perf_counter()
    with edge.Cluster.local(2, threads=1, insecure=is_insecure):
        return time.perf_counter() - begin_s


def _shipped(path: Path, plan: Plan, folder: Path, kind: str, _number: int) -> float:
    """Bytes per second that two peers were sent which had none."""
    sent: list[float] = []

    def watch(progress: edge.Progress) -> None:
        if progress.phase == "send":
            sent.append(time.perf_counter())

    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        os.environ[CACHE_VARIABLE] = empty
        try:
            with (
                _two_peers(kind, Path(empty)) as cluster,
                cluster.load(
                    path, plan=plan, dtype="float32", context_tokens=64, progress=watch
                ) as model,
            ):
                total_bytes = sum(model.sent_bytes.values())
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before
    return total_bytes / (sent[-1] - sent[0])


def _answer(
    model: edge.Model,
    expected: dict[int, tuple[int, ...]],
    prompt_tokens: int,
    new_tokens: int,
    number: int,
) -> dict[str, float]:
    """expected: tokens of the other kinds in the same round."""
    prompt = random_prompt(model, prompt_tokens, number)
    reply = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
    assert reply.token_ids == expected.setdefault(number, reply.token_ids)
    told = reply.statistics
    return {
        f"prefill {prompt_tokens}": told["first_token_s"],
        f"decode {new_tokens}": told["decode_s"],
    }


@case.case(
    "what keys and encryption cost, in turn",
    case.shape(),
    case.choice("--shipped", SHAPES, "M"),
    case.block_size(32),
    *case.lengths(256, 64),
    case.number(
        "--loads", 8, f"How often all are loaded; {ROUNDS_OF_A_LOAD} answers of each count then."
    ),
    case.number("--rounds", 9, "How often peers start and are shipped to."),
    case.FOLDER,
)
def security(given: Given) -> Iterator[Found]:
    """Decode, prefill, shipping and start of two peers, with and without keys.

    The peers have one thread each, and halves of every layer. `insecure` is plain TCP; with keys,
    `one host` is a Unix socket, `two hosts` is what devices of a network have: sealed records over
    TCP. Answers come from clusters that are loaded at once; starting and shipping are of fresh ones
    with empty caches, in float32, which needs no rounding.

    Where a process lies in memory makes it faster or slower for as long as it runs. So all are
    loaded again and again, each as often first as last.
    """
    path, plan, found = given.path, _halves(given.shape, given.block_size), Figures()
    for load in range(given.loads):
        with contextlib.ExitStack() as stack:
            sides, expected = {}, dict[int, tuple[int, ...]]()
            for kind in KINDS if load % 2 else reversed(KINDS):
                cluster = stack.enter_context(_two_peers(kind, given.folder / "security"))
                model = cluster.load(
                    path, plan=plan, dtype="int4-pure", block_size=given.block_size,
                    context_tokens=given.context_tokens, speculate="off",
                )  # fmt: skip
                sides[kind] = partial(
                    _answer, model, expected, given.prompt_tokens, given.new_tokens
                )
            compared(sides, ROUNDS_OF_A_LOAD, over=PLAIN, unit="s", figures=found)
    sent, halves = checkpoint(given.shipped, given.folder), _halves(given.shipped, 1)
    shipping = {kind: partial(_shipped, sent, halves, given.folder, kind) for kind in KINDS}
    for rates in in_turn(shipping, given.rounds):
        for kind, rate in rates.items():
            found.add(f"shipping, {kind}", "MB/s", rate / 1e6)
            if kind != PLAIN:
                found.add(f"shipping, {PLAIN} / {kind}", "ratio", rates[PLAIN] / rate)
    starts = {name: partial(_start_s, name == PLAIN) for name in (PLAIN, "secure")}
    for took in in_turn(starts, given.rounds):
        for name, start_s in took.items():
            found.add(f"start of two peers, {name}", "s", start_s)
        found.add(f"start, secure - {PLAIN}", "s", took["secure"] - took[PLAIN])
    yield Found(
        figures=found,
        variant=f"2 peers x 1 thread, tensor, int4-pure/{given.block_size}; "
        f"shipping {given.shipped} in float32",
        link="loopback",
        model=given.model,
    )
