"""Decoding on a GPU, against what memory allows and transformers. Larger models: gpu_stream.py."""

from __future__ import annotations

import importlib.util
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from edge.backends.registry import open_backend
from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.gpu import (
    GROUP_SIZE,
    NO_GPU,
    config,
    decode,
    described,
    int4_bytes,
    is_there_a_gpu,
    software,
)
from edge.demos.bench.gpu_kernels import copy
from edge.demos.bench.results import Metric
from edge.models.spec import ModelSpec
from edge.profiling.random_weights import written_weights
from edge.protocol.step import StepLimits
from edge.weights.formats import weight_format
from edge.weights.layout import whole_layout

if TYPE_CHECKING:
    import torch

CONFIG = config(layers=32, hidden=4096, columns=14336, heads=32, kv_heads=8, head=128, vocab=128256)
"""8 B parameters."""

SPEC = described(CONFIG)
TINY = config(layers=2, hidden=128, columns=256, heads=4, kv_heads=2, head=32, vocab=64)

Decode = Callable[[int, int], None]
"""Computes `count` tokens from `position` on, and returns when their logits are on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is decoded, and how often."""

    config: dict[str, Any]
    prompt_tokens: int
    warm_ups: int
    steps: int

    @property
    def spec(self) -> ModelSpec:
        return described(self.config)

    @property
    def context_tokens(self) -> int:
        return 2 * (self.prompt_tokens + self.warm_ups + self.steps)


FULL = Size(config=CONFIG, prompt_tokens=512, warm_ups=8, steps=64)
DRY = Size(config=TINY, prompt_tokens=4, warm_ups=1, steps=2)


def decoding(size: Size, *, is_dry: bool, copy_rate: float) -> Iterator[Metric]:
    """Both sides decode the same positions in turn. copy_rate: in GB/s."""
    with (
        edge_decoder(size) as (ours, weights_gb),
        static_cache_decoder(size, is_dry=is_dry) as theirs,
    ):
        sides = [ours] if theirs is None else [ours, theirs]
        seconds = timed(sides, size)
    name = f"{'tiny' if is_dry else '8 B'} shape, int4"
    shares = [weights_gb / each / copy_rate for each in seconds[0]]
    yield Metric(name=f"{name}, speed", unit="tok/s", values=[1 / each for each in seconds[0]])
    yield Metric(name=f"{name}, weights / copy", unit="ratio", values=shares)
    if theirs is not None:
        speeds = [1 / each for each in seconds[1]]
        ratios = [b / a for a, b in zip(*seconds, strict=True)]
        yield Metric(name="transformers bfloat16, static cache", unit="tok/s", values=speeds)
        yield Metric(name=f"{name}, speed / transformers", unit="ratio", values=ratios)


def timed(sides: list[Decode], size: Size) -> list[list[float]]:
    """Seconds of each step of each side, after the prompt and some to warm up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side(0, size.prompt_tokens)
    for step in range(size.warm_ups + size.steps):
        for side, own in zip(sides, seconds, strict=True):
            start_s = time.perf_counter()
            side(size.prompt_tokens + step, 1)
            own.append(time.perf_counter() - start_s)
    return [own[size.warm_ups :] for own in seconds]


@contextmanager
def edge_decoder(size: Size) -> Iterator[tuple[Decode, float]]:
    """And the gigabytes of weights that a token needs."""
    chosen = weight_format(size.spec, "int4-pure", GROUP_SIZE)
    layout = whole_layout(size.spec)
    limits = StepLimits(
        context_tokens=size.context_tokens,
        chunk_tokens=size.prompt_tokens,
        requests=1,
        cached_tokens=size.context_tokens,
    )
    backend = open_backend("triton", threads=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        written_weights(layout, chosen, Path(folder)) as weights,
    ):
        program = backend.load(size.spec, layout, weights, chosen, limits=limits)
    with closing(program):
        yield partial(decode, program), int4_bytes(layout.num_weights) / 1e9


@contextmanager
def static_cache_decoder(size: Size, *, is_dry: bool) -> Iterator[Decode | None]:
    """The same shape in `transformers`; None where that is not installed."""
    if importlib.util.find_spec("transformers") is None:
        print("transformers: not run: it is not installed")
        yield None
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    sizes = LlamaConfig(**size.config)
    device = torch.device("cpu" if is_dry else "cuda")
    with device:
        kept, _ = torch.get_default_dtype(), torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(sizes).eval()
        finally:
            torch.set_default_dtype(kept)
    cache = StaticCache(config=sizes, max_cache_len=size.context_tokens)
    is_renamed = "cache" in inspect.signature(model.forward).parameters  # since 5.24
    held = {"cache" if is_renamed else "past_key_values": cache}
    options: dict[str, Any] = {"backend": "eager"} if is_dry else {"mode": "reduce-overhead"}
    compiled = torch.compile(model.forward, fullgraph=True, **options)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def decode_theirs(position: int, count: int) -> None:
        places = torch.arange(position, position + count, device=device)
        forward = compiled if count == 1 else model.forward
        tokens = torch.full((1, count), 7, device=device)
        rows: torch.Tensor = forward(
            input_ids=tokens,
            position_ids=places[None],
            cache_position=places,
            **held,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        rows.float().cpu()

    try:
        yield decode_theirs
    finally:
        torch.compiler.reset()


@case.case(
    "decoding on a GPU, beside its memory and transformers",
    click.option(
        "--dry-run", "is_dry", is_flag=True, help="Tiny, on the CPU; its figures are not kept."
    ),
)
def gpu_decode(given: Given) -> Iterator[Found]:
    """How fast does the back end for GPUs decode, from token to logits?

    A model of 8 B parameters in int4, step by step in turn with `transformers`: the same shape in
    bfloat16, a static cache, and a decoding step that torch.compile has compiled. Weights are made
    up. --dry-run runs all of it with tiny shapes and interpreted kernels.
    """
    if given.is_dry:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not is_there_a_gpu():
        click.echo(NO_GPU)
        return
    copied = Metric(name="of a dry run", unit="GB/s", values=[1.0]) if given.is_dry else copy()
    size = DRY if given.is_dry else FULL
    yield Found(
        figures=[copied, *decoding(size, is_dry=given.is_dry, copy_rate=median(copied.values))],
        variant=f"{software()}, int4 in blocks of {GROUP_SIZE}, after {size.prompt_tokens} tokens",
        link="none",
        model="made up",
        keep=not given.is_dry,
    )
