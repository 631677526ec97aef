"""Speed, loading and memory of a model on peers of this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

import edge
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.results import Figures
from edge.demos.bench.turns import random_prompt
from edge.demos.processes import peak_bytes
from edge.host.cache_paths import CACHE_VARIABLE

MIB = 1 << 20


@case.case(
    "decode",
    case.shape("tiny"),
    *case.peers(2, 1),
    case.dtype(),
    case.block_size(32),
    *case.lengths(128, 64),
    case.number("--repeats", 5),
    case.number("--warm-ups", 1, least=0),
    case.FOLDER,
)
def decode(given: Given) -> Iterator[Found]:
    """How fast does a model answer over peers on this machine, and what does each of them hold?

    It is loaded with every weight sent, answers again and again, and is loaded once more.
    """
    path, figures = given.path, Figures()
    # The context is what the run uses, so the KV bytes that are planned are all written.
    options: dict[str, Any] = {
        "dtype": given.dtype,
        "block_size": given.block_size,
        "plan": given.plan,
        "context_tokens": given.context_tokens,
        "speculate": "off",
    }
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="shards-") as shards:
        os.environ[CACHE_VARIABLE] = shards  # the daemons start with an empty cache
        with edge.Cluster.local(given.peers, threads=given.threads) as cluster:
            os.environ[CACHE_VARIABLE] = str(given.folder / "cache")
            idle, phases = _peak_bytes(), set[str]()
            started_s = time.perf_counter()
            with cluster.load(
                path, **options, progress=lambda event: phases.add(event.phase)
            ) as model:
                load_s = time.perf_counter() - started_s
                for number in range(given.warm_ups + given.repeats):
                    prompt = random_prompt(model, given.prompt_tokens, number)
                    reply = model.generate(prompt, max_new_tokens=given.new_tokens, ignore_eos=True)
                    assert len(reply.token_ids) == given.new_tokens, reply.finish_reason
                    if number >= given.warm_ups:
                        first_s = reply.statistics["first_token_s"]
                        figures.add("decode", "tok/s", reply.tokens_per_s)
                        figures.add("first token", "s", first_s)
                        figures.add("prefill", "tok/s", given.prompt_tokens / first_s)
                peak, rows = _peak_bytes(), model.proposal.rows
                sent_bytes = sum(model.sent_bytes.values())
            quantised = "quantising and " if "quantise" in phases else ""
            figures.add(f"load, {quantised}sending", "s", load_s)
            started_s = time.perf_counter()
            with cluster.load(path, **options, progress=False):
                figures.add("load, shards cached", "s", time.perf_counter() - started_s)
    figures.add("bytes sent", "MiB", sent_bytes / MIB)
    for row in rows:
        figures.add(f"{row.name}: weights planned", "MiB", row.memory.weight_bytes / MIB)
        figures.add(f"{row.name}: KV planned", "MiB", row.memory.kv_bytes / MIB)
        figures.add(f"{row.name}: peak resident, before loading", "MiB", idle[row.name] / MIB)
        figures.add(f"{row.name}: peak resident", "MiB", peak[row.name] / MIB)
    weights = given.dtype if given.dtype == "float32" else f"{given.dtype}/{given.block_size}"
    yield Found(
        figures=figures,
        variant=f"edge, {weights}, {given.peers} x {given.threads} threads, plan {given.plan}, "
        f"{given.prompt_tokens} + {given.new_tokens} tokens",
        model=given.model,
    )


def _peak_bytes() -> dict[str, int]:
    """The most memory each daemon ever held, by its name."""
    commands = {daemon.pid: daemon.cmdline() for daemon in psutil.Process().children()}
    return {
        command[command.index("--name") + 1]: peak_bytes(pid)
        for pid, command in commands.items()
        if "--name" in command
    }
