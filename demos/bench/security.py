"""What keys and encryption cost: the same peers with and without them, in turn.

python -m edge.demos.bench.security --shape W --block-size 128

Two peers of one thread each, in halves of every layer over loopback TCP. Answers come from two
clusters that are loaded at once; starting and shipping are of fresh ones with empty caches, in
float32, which needs no rounding.
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
from edge.demos.bench.shapes import SHAPES, checkpoint, described, even_plan
from edge.host.cache_paths import CACHE_VARIABLE
from edge.partition import Plan

KINDS = {"insecure": True, "secure": False}
DEVICES = ("local-1", "local-2")
ROUNDS_OF_A_LOAD = 4
"""After one that warms up."""


@contextlib.contextmanager
def empty_cache(folder: Path) -> Iterator[None]:
    """Caches of a run of its own."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        os.environ[CACHE_VARIABLE] = cache
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before


def start_and_ship(path: Path, plan: Plan, folder: Path, *, insecure: bool) -> tuple[float, float]:
    """Seconds until two peers have started; bytes per second that they were sent."""
    sent: list[float] = []

    def watch(progress: edge.Progress) -> None:
        if progress.phase == "send":
            sent.append(time.perf_counter())

    with empty_cache(folder):
        begin_s = time.perf_counter()
        with edge.Cluster.local(2, threads=1, insecure=insecure) as cluster:
            start_s = time.perf_counter() - begin_s
            with cluster.load(
                path, plan=plan, dtype="float32", context_tokens=64, progress=watch
            ) as model:
                shipped = sum(model.sent_bytes.values())
    return start_s, shipped / (sent[-1] - sent[0])


def answers(
    path: Path, plan: Plan, *, block_size: int, prompt_tokens: int, new_tokens: int, loads: int
) -> Figures:
    """Speeds with and without keys, and within each round what they cost.

    Where a process lies in memory makes it faster or slower for as long as it runs. So both are
    loaded again and again, each as often first as second.
    """
    found = Figures()
    for number in range(loads):
        kinds = list(KINDS) if number % 2 else list(reversed(KINDS))
        with contextlib.ExitStack() as stack:
            models = {}
            for name in kinds:
                cluster = edge.Cluster.local(2, threads=1, insecure=KINDS[name])
                models[name] = stack.enter_context(cluster).load(
                    path,
                    plan=plan,
                    dtype="int4-pure",
                    block_size=block_size,
                    context_tokens=prompt_tokens + new_tokens,
                )
            for each in range(ROUNDS_OF_A_LOAD + 1):
                _answer(models, prompt_tokens, new_tokens, Figures() if not each else found)
    return found


def _answer(
    models: Mapping[str, edge.Model], prompt_tokens: int, new_tokens: int, found: Figures
) -> None:
    """One answer of each, in turn."""
    vocab_size = models["secure"].vocab_size
    prompt = np.random.default_rng(1).integers(vocab_size, size=prompt_tokens).tolist()
    replies = {
        name: model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
        for name, model in models.items()
    }
    assert replies["secure"].token_ids == replies["insecure"].token_ids
    told = {name: replies[name].statistics for name in KINDS}
    for what, took in (
        (f"prefill {prompt_tokens}", {name: told[name]["first_token_s"] for name in KINDS}),
        (f"decode {new_tokens}", {name: told[name]["decode_s"] for name in KINDS}),
    ):
        for name in KINDS:
            found.add(f"{what}, {name}", "s", took[name])
        found.add(f"{what}, secure / insecure", "ratio", took["secure"] / took["insecure"])


def fresh(path: Path, plan: Plan, folder: Path, rounds: int, found: Figures) -> None:
    """What starting and shipping take, with and without keys."""
    for number in range(rounds + 1):
        took = {
            name: start_and_ship(path, plan, folder, insecure=KINDS[name])
            for name in (list(KINDS) if number % 2 else reversed(KINDS))
        }
        if not number:
            continue
        for name, (start_s, rate) in took.items():
            found.add(f"start of two peers, {name}", "s", start_s)
            found.add(f"shipping, {name}", "MB/s", rate / 1e6)
        found.add("start, secure - insecure", "s", took["secure"][0] - took["insecure"][0])
        found.add("shipping, insecure / secure", "ratio", took["insecure"][1] / took["secure"][1])


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
    help=f"How often both are loaded; {ROUNDS_OF_A_LOAD} answers of each in turn count each time.",
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
    found = answers(path, plan, block_size=block_size, loads=loads, **lengths)
    fresh(checkpoint(shipped, folder), even_plan(shipped, DEVICES, 1), folder, rounds, found)
    results.publish(
        found.metrics(),
        question="what keys and encryption cost, in turn",
        variant=f"2 peers x 1 thread, tensor, int4-pure/{block_size}; "
        f"shipping {shipped} in float32",
        link="TCP over loopback",
        model=described(shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
