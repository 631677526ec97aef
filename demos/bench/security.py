"""What keys and encryption cost: the same peers with and without them, in turn.

python -m edge.demos.bench.security --shape W --block-size 128

Two peers of one thread each, in halves of every layer over loopback. Three kinds: `insecure` is
plain TCP; with keys, `one host` is a Unix socket, `two hosts` is what devices of a network have:
sealed records over TCP. Answers come from clusters that are loaded at once; starting and shipping
are of fresh ones with empty caches, in float32, which needs no rounding.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures
from edge.demos.fleet import Fleet
from edge.demos.shapes import SHAPES, checkpoint, described, even_plan
from edge.host.cache_paths import CACHE_VARIABLE
from edge.partition import Plan

PLAIN = "insecure"
KINDS = {
    PLAIN: ("--insecure",),
    "one host": (),
    "two hosts": ("--listen", "127.0.0.2:0"),
}
"""What `edge peer` is given. Who calls 127.0.0.2 does so from 127.0.0.1, and takes it for another
host."""
DEVICES = ("local-1", "local-2")
ROUNDS_OF_A_LOAD = 4
"""After one that warms up."""


@contextlib.contextmanager
def empty_cache(folder: Path) -> Iterator[Path]:
    """Caches of a run of its own; the folder."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        os.environ[CACHE_VARIABLE] = cache
        try:
            yield Path(cache)
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before


@contextlib.contextmanager
def two_peers(kind: str, folder: Path) -> Iterator[edge.Cluster]:
    """Which keep their weights in the folder."""
    options = dict.fromkeys(DEVICES, KINDS[kind])
    with (
        Fleet(DEVICES, folder, options=options) as fleet,
        edge.Cluster.connect(list(fleet.addresses.values()), insecure=kind == PLAIN) as cluster,
    ):
        yield cluster


def started_s(*, insecure: bool) -> float:
    """Until two peers have started."""
    begin_s = time.perf_counter()
    with edge.Cluster.local(2, threads=1, insecure=insecure):
        return time.perf_counter() - begin_s


def shipped(path: Path, plan: Plan, folder: Path, kind: str) -> float:
    """Bytes per second that two peers were sent which had none."""
    sent: list[float] = []

    def watch(progress: edge.Progress) -> None:
        if progress.phase == "send":
            sent.append(time.perf_counter())

    with (
        empty_cache(folder) as empty,
        two_peers(kind, empty) as cluster,
        cluster.load(path, plan=plan, dtype="float32", context_tokens=64, progress=watch) as model,
    ):
        total_bytes = sum(model.sent_bytes.values())
    return total_bytes / (sent[-1] - sent[0])


def answers(
    path: Path,
    plan: Plan,
    folder: Path,
    *,
    block_size: int,
    prompt_tokens: int,
    new_tokens: int,
    loads: int,
) -> Figures:
    """Speeds with and without keys, and within each round what they cost.

    Where a process lies in memory makes it faster or slower for as long as it runs. So all are
    loaded again and again, each as often first as last.
    """
    found = Figures()
    for number in range(loads):
        with contextlib.ExitStack() as stack:
            models = {}
            for name in _in_turn(number):
                cluster = stack.enter_context(two_peers(name, folder))
                models[name] = cluster.load(
                    path,
                    plan=plan,
                    dtype="int4-pure",
                    block_size=block_size,
                    context_tokens=prompt_tokens + new_tokens,
                )
            for each in range(ROUNDS_OF_A_LOAD + 1):
                chance = np.random.default_rng((number, each))  # no beginning is found again
                prompt = chance.integers(models[PLAIN].vocab_size, size=prompt_tokens).tolist()
                _answer(models, prompt, new_tokens, Figures() if not each else found)
    return found


def _answer(
    models: Mapping[str, edge.Model], prompt: list[int], new_tokens: int, found: Figures
) -> None:
    """One answer of each, in turn."""
    replies = {
        name: model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
        for name, model in models.items()
    }
    assert len({tuple(reply.token_ids) for reply in replies.values()}) == 1
    told = {name: replies[name].statistics for name in KINDS}
    for what, took in (
        (f"prefill {len(prompt)}", {name: told[name]["first_token_s"] for name in KINDS}),
        (f"decode {new_tokens}", {name: told[name]["decode_s"] for name in KINDS}),
    ):
        for name in KINDS:
            found.add(f"{what}, {name}", "s", took[name])
            if name != PLAIN:
                found.add(f"{what}, {name} / {PLAIN}", "ratio", took[name] / took[PLAIN])


def _in_turn(number: int) -> list[str]:
    return list(KINDS) if number % 2 else list(reversed(KINDS))


def fresh(path: Path, plan: Plan, folder: Path, rounds: int, found: Figures) -> None:
    """What starting and shipping take, with and without keys."""
    for number in range(rounds + 1):
        rates = {name: shipped(path, plan, folder, name) for name in _in_turn(number)}
        kinds = (True, False) if number % 2 else (False, True)
        started = {insecure: started_s(insecure=insecure) for insecure in kinds}
        if not number:
            continue
        for insecure, start_s in started.items():
            found.add(f"start of two peers, {PLAIN if insecure else 'secure'}", "s", start_s)
        found.add(f"start, secure - {PLAIN}", "s", started[False] - started[True])
        for name, rate in rates.items():
            found.add(f"shipping, {name}", "MB/s", rate / 1e6)
            if name != PLAIN:
                found.add(f"shipping, {PLAIN} / {name}", "ratio", rates[PLAIN] / rate)


@click.command()
@shape_option()
@click.option(
    "--shipped",
    type=click.Choice(list(SHAPES)),
    default="M",
    show_default=True,
    help="The shape that is shipped, in float32.",
)
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--loads",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help=f"How often all are loaded; {ROUNDS_OF_A_LOAD} answers of each in turn count each time.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=9,
    show_default=True,
    help="How often peers start and are shipped to.",
)
@folder_option
@append_option
def main(
    shape: str,
    shipped: str,
    block_size: int,
    loads: int,
    rounds: int,
    folder: Path,
    append: bool,
    **lengths: Any,
) -> None:
    """Decode, prefill, shipping and start of two peers, with and without keys."""
    path = checkpoint(shape, folder)
    plan = even_plan(shape, DEVICES, block_size)
    kept = folder / "security"
    found = answers(path, plan, kept, block_size=block_size, loads=loads, **lengths)
    fresh(checkpoint(shipped, folder), even_plan(shipped, DEVICES, 1), folder, rounds, found)
    results.publish(
        found.metrics(),
        question="what keys and encryption cost, in turn",
        variant=f"2 peers x 1 thread, tensor, int4-pure/{block_size}; "
        f"shipping {shipped} in float32",
        link="loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
