"""Triton kernels beside the limits of a GPU. Whole models are in gpu_decode.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import click

from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.gpu import GROUP_SIZE, NO_GPU, is_there_a_gpu, software
from edge.demos.bench.results import Metric

if TYPE_CHECKING:
    import torch

    from edge.kernels.kv_cache.gpu_cache import KvCache

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
DEVICE = "cuda"
COPIED_BYTES = 1 << 30


def times_ms(call: Callable[[], object]) -> list[float]:
    """Times of many calls, each with a cold cache."""
    from triton.testing import do_bench

    found: list[float] = do_bench(call, warmup=50, rep=300, return_mode="all")
    return found


def moved(name: str, nbytes: int, call: Callable[[], object], copy_rate: float) -> list[Metric]:
    """Time, memory rate, and its share of a copy's."""
    times = times_ms(call)
    rates = [nbytes / time_ms / 1e6 for time_ms in times]
    return [
        Metric(name=f"{name}, time", unit="µs", values=[1e3 * time_ms for time_ms in times]),
        Metric(name=f"{name}, rate", unit="GB/s", values=rates),
        Metric(name=f"{name}, rate / copy", unit="ratio", values=[r / copy_rate for r in rates]),
    ]


def copy() -> Metric:
    """Bytes read and written each second."""
    import torch

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = times_ms(lambda: target.copy_(source))
    rates = [2 * COPIED_BYTES / time_ms / 1e6 for time_ms in times]
    return Metric(name="copy of 1 GiB, rate", unit="GB/s", values=rates)


def norm(copy_rate: float) -> Iterator[Metric]:
    import torch

    from edge.kernels.rms_norm.triton import add_rms_norm

    for rows in (1, 4096):
        x, addend, out, total = (bfloat16(rows, 4096) for _ in range(4))
        weight = torch.ones(4096, device=DEVICE)
        call = partial(add_rms_norm, x, addend, weight, epsilon=1e-5, out=out, total=total)
        nbytes = 4 * x.nbytes + weight.nbytes
        yield from moved(f"RMSNorm + residual {rows} x 4096", nbytes, call, copy_rate)


def packed_products(copy_rate: float) -> Iterator[Metric]:
    """One row against the copy; more rows against the one."""
    import torch

    from edge.kernels.matmul_nbits.gpu_layout import WORDS, num_tiles
    from edge.kernels.matmul_nbits.triton import PackedWeight, matmul_nbits

    for outputs, inputs in ((4096, 14336), (8192, 28672)):
        weight = PackedWeight(
            words=torch.randint(
                *(-(2**31), 2**31 - 1, (num_tiles(inputs, 4), outputs, WORDS)),
                dtype=torch.int32,
                device=DEVICE,
            ),
            scales=torch.full((inputs // GROUP_SIZE, outputs), 0.01, device=DEVICE),
            bits=4,
            block_size=GROUP_SIZE,
            columns=inputs,
        )
        nbytes = weight.words.nbytes + weight.scales.nbytes
        one_row_us: list[float] = []
        for rows in (1, 2, 4, 16, 32, 64):
            call = partial(matmul_nbits, bfloat16(rows, inputs), weight)
            name = f"int4 {outputs} x {inputs}, {rows} rows"
            found = moved(name, nbytes, call, copy_rate)
            yield from found
            if rows == 1:
                one_row_us = list(found[0].values)
            else:
                base = median(one_row_us)
                ratio = [time_us / base for time_us in found[0].values]
                yield Metric(name=f"{name}, time / one row's", unit="ratio", values=ratio)


def decoding(copy_rate: float) -> Iterator[Metric]:
    import torch

    from edge.kernels.attention.triton import attention

    for keys in (8192, 32768):
        for batch in (1, 32):
            query = bfloat16(batch, HEADS, HEAD_SIZE)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
            lengths = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)
            for bits in (16, 8, 4):
                cache, nbytes = make_cache(batch, keys, bits)
                call = partial(
                    attention, query, cache, starts=starts, lengths=lengths, max_queries=1
                )
                name = f"decode {batch} x {keys} keys of {bits} bits"
                yield from moved(name, nbytes, call, copy_rate)
                del cache, call


def prompts() -> Iterator[Metric]:
    """TFLOP/s of what is not masked, and the time of torch's attention over ours."""
    import torch
    from torch.nn import functional

    from edge.kernels.attention.triton import AttentionTiles, attention
    from edge.kernels.kv_cache.gpu_cache import KvCache
    from edge.kernels.triton_launch import Launch

    for tokens in (2048, 8192):
        query = bfloat16(tokens, HEADS, HEAD_SIZE)
        keys, values = (bfloat16(1, KV_HEADS, tokens, HEAD_SIZE) for _ in range(2))
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
        lengths = starts[1:].contiguous()
        cache = KvCache(keys=keys, values=values)
        heads_first = query.transpose(0, 1)[None].contiguous()
        theirs = partial(
            functional.scaled_dot_product_attention,
            *(heads_first, keys, values),
            is_causal=True,
            enable_gqa=True,
        )
        torch_ms = median(times_ms(theirs))
        operations = 2 * HEADS * HEAD_SIZE * tokens * (tokens + 1)
        for rows, num_warps in ((64, 4), (128, 8)):
            tiles = AttentionTiles(rows=rows, launch=Launch(num_warps=num_warps))
            sizes = {"starts": starts, "lengths": lengths, "max_queries": tokens, "tiles": tiles}
            times = times_ms(partial(attention, query, cache, **sizes))
            name = f"prompt of {tokens}, {rows} rows a tile"
            speeds = [operations / time_ms / 1e9 for time_ms in times]
            ratio = [torch_ms / time_ms for time_ms in times]
            yield Metric(name=f"{name}, speed", unit="TFLOP/s", values=speeds)
            yield Metric(name=f"{name}, torch's time / ours", unit="ratio", values=ratio)


def bfloat16(*shape: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def make_cache(
    batch: int, tokens: int, bits: int, *, num_kv_heads: int = KV_HEADS, head_size: int = HEAD_SIZE
) -> tuple[KvCache, int]:
    """A cache, and the bytes in it."""
    import torch

    from edge.kernels.kv_cache.gpu_cache import KvCache

    if bits == 16:
        keys, values = (bfloat16(batch, num_kv_heads, tokens, head_size) for _ in range(2))
        return KvCache(keys=keys, values=values), keys.nbytes + values.nbytes
    shape = (batch, num_kv_heads, tokens)
    low, high, kind = (-127, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    keys, values = (
        torch.randint(low, high, (*shape, head_size * bits // 8), dtype=kind, device=DEVICE)
        for _ in range(2)
    )
    groups = 1 if bits == 8 else head_size // 32
    scales = torch.full((*shape, groups), 0.01, dtype=torch.float16, device=DEVICE)
    cache = KvCache(keys=keys, values=values, key_scales=scales, value_scales=scales.clone())
    return cache, keys.nbytes + values.nbytes + 2 * scales.nbytes


@case.case("Triton kernels beside the GPU's limits")
def gpu_kernels(_given: Given) -> Iterator[Found]:
    """How near to the limits of this machine's GPU do the Triton kernels come?

    Decoding is bound by memory, so it is compared with a copy on the same GPU in the same call;
    prompts are compared with torch's own attention. Between repeats the GPU's cache is overwritten.
    """
    if not is_there_a_gpu():
        click.echo(NO_GPU)
        return
    copied = copy()
    rate = median(copied.values)
    yield Found(
        figures=[copied, *norm(rate), *packed_products(rate), *decoding(rate), *prompts()],
        variant=f"{software()}, bfloat16, int4 in blocks of {GROUP_SIZE}",
        link="none",
        model="none",
    )
