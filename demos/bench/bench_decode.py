"""How fast does a model answer over peers on this machine, and what does each of them hold?

python -m edge.demos.bench.bench_decode --shape W --peers 2 --threads 1 --dtype int4 --plan tensor
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

import edge
from edge.demos.bench import results
from edge.demos.bench.options import append_option, folder_option, shape_option
from edge.demos.bench.results import Figures, Metric
from edge.demos.processes import peak_bytes
from edge.demos.shapes import checkpoint, described
from edge.host.cache_paths import CACHE_VARIABLE

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the benchmark."""

    shape: str
    peers: int
    threads: int
    dtype: str
    block_size: int
    plan: str
    prompt_tokens: int
    new_tokens: int
    repeats: int
    warm_ups: int
    folder: Path

    @property
    def variant(self) -> str:
        weights = self.dtype if self.dtype == "float32" else f"{self.dtype}/{self.block_size}"
        return (
            f"edge, {weights}, {self.peers} x {self.threads} threads, plan {self.plan}, "
            f"{self.prompt_tokens} + {self.new_tokens} tokens"
        )

    @property
    def load_options(self) -> dict[str, Any]:
        """The context is what the run uses, so the KV bytes that are planned are all written."""
        return {
            "dtype": self.dtype,
            "block_size": self.block_size,
            "plan": self.plan,
            "context_tokens": self.prompt_tokens + self.new_tokens,
        }


def measure(settings: Settings) -> list[Metric]:
    """Load with every weight sent, answer again and again, look at memory, load once more."""
    path = checkpoint(settings.shape, settings.folder)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shards-") as shards:
        os.environ[CACHE_VARIABLE] = shards  # the daemons start with an empty cache
        with edge.Cluster.local(settings.peers, threads=settings.threads) as cluster:
            os.environ[CACHE_VARIABLE] = str(settings.folder / "cache")
            idle = _peak_bytes()
            phases: set[str] = set()
            started_s = time.perf_counter()
            model = cluster.load(
                path, **settings.load_options, progress=lambda event: phases.add(event.phase)
            )
            load_s = time.perf_counter() - started_s
            rows = model.proposal.rows
            with model:
                sent_bytes = sum(model.sent_bytes.values())
                replies = _answers(model, settings)
                peak = _peak_bytes()
            started_s = time.perf_counter()
            with cluster.load(path, **settings.load_options, progress=False):
                cached_load_s = time.perf_counter() - started_s
    first_load = "load, quantising and sending" if "quantise" in phases else "load, sending"
    figures = Figures()
    for reply in replies:
        first_s = reply.statistics["first_token_s"]
        figures.add("decode", "tok/s", reply.tokens_per_s)
        figures.add("first token", "s", first_s)
        figures.add("prefill", "tok/s", settings.prompt_tokens / first_s)
    figures.add(first_load, "s", load_s)
    figures.add("load, shards cached", "s", cached_load_s)
    figures.add("bytes sent", "MiB", sent_bytes / MIB)
    for row in rows:
        figures.add(f"{row.name}: weights planned", "MiB", row.memory.weight_bytes / MIB)
        figures.add(f"{row.name}: KV planned", "MiB", row.memory.kv_bytes / MIB)
        figures.add(f"{row.name}: peak resident, before loading", "MiB", idle[row.name] / MIB)
        figures.add(f"{row.name}: peak resident", "MiB", peak[row.name] / MIB)
    return figures.metrics()


def _answers(model: edge.Model, settings: Settings) -> list[edge.Reply]:
    """Every repeat after the warm-ups; a prompt like no other each time, so that none is found."""
    generator = np.random.default_rng(1)
    found: list[edge.Reply] = []
    for _ in range(settings.warm_ups + settings.repeats):
        prompt = generator.integers(model.vocab_size, size=settings.prompt_tokens).tolist()
        reply = model.generate(prompt, max_new_tokens=settings.new_tokens, ignore_eos=True)
        assert len(reply.token_ids) == settings.new_tokens, reply.finish_reason
        found.append(reply)
    return found[settings.warm_ups :]


def _peak_bytes() -> dict[str, int]:
    """The most memory each daemon ever held, by its name."""
    found: dict[str, int] = {}
    for daemon in psutil.Process().children():
        command = daemon.cmdline()
        if "--name" in command:
            found[command[command.index("--name") + 1]] = peak_bytes(daemon.pid)
    return found


@click.command()
@shape_option(default="tiny")
@click.option("--peers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Per peer.")
@click.option("--dtype", default="int4", show_default=True, help="float32, int8 or int4.")
@click.option("--block-size", type=int, default=32, show_default=True)
@click.option("--plan", default="tensor", show_default=True, help="auto, pipeline or tensor.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--warm-ups", type=click.IntRange(0), default=1, show_default=True)
@folder_option
@append_option
def main(append: bool, folder: Path, **options: Any) -> None:
    """Measure decoding, prefill, loading and memory through the public API."""
    settings = Settings(folder=folder, **options)
    print(f"{settings.shape}: {settings.variant}")
    results.publish(
        measure(settings),
        question="decode",
        variant=settings.variant,
        link="TCP over loopback",
        model=described(settings.shape),
        keep=append,
    )


if __name__ == "__main__":
    main()
