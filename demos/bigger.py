"""Bigger than memory: a peer with less memory than the model has, live, token by token."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

import edge
from edge.answers.text import decode_rate
from edge.demos.bundled import require
from edge.demos.control_groups import ControlGroup, remove_groups_of_the_dead
from edge.demos.limited_peer import KERNEL_BYTES, LimitedPeer, limited_peer
from edge.demos.shapes import SHAPES, checkpoint
from edge.host.cache_paths import CACHE_VARIABLE
from edge.host.free_memory import format_size
from edge.weights.formats import Dtype

SHAPE = "small"
DTYPE: Dtype = "float32"
"""Nothing to round first; and the model is larger than all that the process takes."""

SHARE = 0.4
"""Share of the weights that stays in memory, the window included."""

CONTEXT_TOKENS = 64
NEW_TOKENS = 24
PROMPT = "Once upon a time"
PREFIX = "edgebigger"


def run() -> None:
    """The same reply twice: with memory for the whole model, and with a limit below its size."""
    with tempfile.TemporaryDirectory(prefix="edge-demo-") as name:
        folder = Path(name)
        os.environ[CACHE_VARIABLE] = str(folder / "cache")  # what is kept of it goes with it
        million = SHAPES[SHAPE].num_parameters / 1e6
        print(f"Making up a model of {million:.0f} million parameters in {DTYPE} ...")
        path = checkpoint(SHAPE, folder)
        whole = _run_whole(path, folder / "cache")
        limit = whole.limit_bytes
        print(
            f"  without a limit: {len(whole.token_ids)} tokens, {whole.tokens_per_s:.1f} tok/s, "
            f"{format_size(whole.weight_bytes)} of weights in memory"
        )
        require(limit < whole.weight_bytes, "the limit should be below the model's size")
        with _group(limit) as group:
            who = "a control group of the system" if group else "the peer alone"
            print(f"Again with a limit of {format_size(limit)}, kept by {who} ...\n")
            _run_limited(path, folder / "cache", whole, limit, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The model's results with enough memory."""

    token_ids: tuple[int, ...]
    tokens_per_s: float
    weight_bytes: int
    limit_bytes: int
    """For all that the process takes, when it is limited."""


def _run_whole(path: Path, cache: Path) -> Whole:
    with limited_peer(cache=cache, name="roomy") as peer, _loaded(peer, path) as model:
        reply = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        (row,) = model.proposal.rows
        return Whole(
            token_ids=reply.token_ids,
            tokens_per_s=reply.tokens_per_s,
            weight_bytes=row.memory.weight_bytes,
            limit_bytes=int(SHARE * row.memory.weight_bytes)
            + row.memory.kv_bytes
            + peer.stated_bytes(),
        )


def _run_limited(
    path: Path, cache: Path, whole: Whole, limit: int, group: ControlGroup | None
) -> None:
    with (
        limited_peer(cache=cache, name="limited", memory_bytes=limit, group=group) as peer,
        _loaded(peer, path) as model,
    ):
        (shard,) = model.plan.stages[0].slices
        layers = SHAPES[SHAPE].num_layers
        print(f"  {shard.streamed_layers} of {layers} layers are read from disk for each token")
        tokens = _stream_live(model, peer, whole, limit)
        peak = peer.peak_bytes
        require(tokens == whole.token_ids, "the limit changed the tokens")
        require(peak <= limit, f"the peer took {format_size(peak)}, more than its limit")
        print(
            f"\n  {len(tokens)} tokens: the same as with the whole model in memory. The peer never "
            f"held more than {format_size(peak)}, and the model has "
            f"{format_size(whole.weight_bytes)}."
        )


def _stream_live(model: edge.Model, peer: LimitedPeer, whole: Whole, limit: int) -> tuple[int, ...]:
    """The reply, while a table shows what it takes."""
    tokens: list[int] = []
    first_s = 0.0
    start_s, start_bytes = time.perf_counter(), peer.bytes_read
    stream = model.stream(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with Live(console=Console(), auto_refresh=False) as live, stream:
        for token in stream:
            first_s = first_s or token.chosen_s
            tokens.append(token.token_id)
            seconds = time.perf_counter() - start_s
            read = peer.bytes_read - start_bytes
            table = Table.grid(padding=(0, 2))
            for what, held in (("in memory", peer.resident_bytes), ("limit", limit)):
                bar = ProgressBar(total=whole.weight_bytes, completed=held, width=40)
                table.add_row(f"  {what}", bar, format_size(held))
            table.add_row("  read from disk", "", f"{format_size(int(read / seconds))}/s")
            rate = decode_rate(len(tokens), token.chosen_s - first_s)
            speed = "" if rate is None else f"{rate:.1f} tok/s "
            table.add_row("  speed", "", f"{speed}({len(tokens)} tokens)")
            live.update(table, refresh=True)
    return tuple(tokens)


@contextlib.contextmanager
def _loaded(peer: LimitedPeer, path: Path) -> Iterator[edge.Model]:
    with (
        edge.Cluster.connect([peer.address]) as cluster,
        cluster.load(path, dtype=DTYPE, context_tokens=CONTEXT_TOKENS, stream="on") as model,
    ):
        yield model


def _group(limit: int) -> contextlib.AbstractContextManager[ControlGroup | None]:
    """Where the system lets us make one: for root, and with a hierarchy that may be changed."""
    try:
        remove_groups_of_the_dead(PREFIX)
        return ControlGroup(f"{PREFIX}-{os.getpid()}", memory_bytes=limit + KERNEL_BYTES)
    except OSError:
        return contextlib.nullcontext()
