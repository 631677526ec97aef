"""Triton kernels beside the limits of a GPU. Whole models are in gpu_decode.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from edge.demos.bench import case
from edge.demos.bench.case import Found, Given
from edge.demos.bench.gpu import (
    DEVICE,
    GROUP_SIZE,
    NO_GPU,
    Make,
    is_there_a_gpu,
    software,
    times_ms,
)
from edge.demos.bench.results import Metric

if TYPE_CHECKING:
    import torch

    from edge.kernels.kv_cache.gpu_cache import KvCache
    from edge.kernels.matmul_nbits.triton import PackedWeight

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
HIDDEN, COLUMNS, VOCAB = 4096, 14336, 128256
ROWS = (1, 4096)
"""Rows of operators that treat each by itself: a step of one request, a chunk of a prompt."""
COPIED_BYTES = 1 << 30
EPSILON = 1e-5


def moved(name: str, nbytes: int, make: Make, copy_rate: float) -> list[Metric]:
    """Time, memory rate, and its share of a copy's."""
    times = times_ms(make, nbytes)
    rates = [nbytes / time_ms / 1e6 for time_ms in times]
    return [
        Metric(name=f"{name}, time", unit="µs", values=[1e3 * time_ms for time_ms in times]),
        Metric(name=f"{name}, rate", unit="GB/s", values=rates),
        Metric(name=f"{name}, rate / copy", unit="ratio", values=[r / copy_rate for r in rates]),
    ]


def beside_torch(
    name: str, nbytes: int, ours: Make, theirs: Make, copy_rate: float
) -> Iterator[Metric]:
    """As `moved`, and the time of what torch has for it."""
    found = moved(name, nbytes, ours, copy_rate)
    yield from found
    torch_us = 1e3 * median(times_ms(theirs, nbytes))
    ratio = [torch_us / time_us for time_us in found[0].values]
    yield Metric(name=f"{name}, torch's time / ours", unit="ratio", values=ratio)


def copy() -> Metric:
    """Bytes read and written each second.

    Not in a graph: there a copy is no kernel but a transfer, which is slower.
    """
    import torch
    from triton.testing import do_bench

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times: list[float] = do_bench(
        lambda: target.copy_(source), warmup=50, rep=300, return_mode="all"
    )
    rates = [2 * COPIED_BYTES / time_ms / 1e6 for time_ms in times]
    return Metric(name="copy of 1 GiB, rate", unit="GB/s", values=rates)


def norms(copy_rate: float) -> Iterator[Metric]:
    """With the residual sum before them, which for torch is a call of its own."""
    from torch.nn import functional

    from edge.kernels.layer_norm.triton import add_layer_norm
    from edge.kernels.rms_norm.triton import add_rms_norm

    def ours(norm: Callable[..., object], rows: int, *weights: torch.Tensor) -> Make:
        def make(_number: int) -> Callable[[], object]:
            x, addend, out, total = (bfloat16(rows, HIDDEN) for _ in range(4))
            return partial(norm, x, addend, *weights, epsilon=EPSILON, out=out, total=total)

        return make

    def theirs(norm: Callable[..., object], rows: int, *weights: torch.Tensor) -> Make:
        def make(_number: int) -> Callable[[], object]:
            x, addend = (bfloat16(rows, HIDDEN) for _ in range(2))
            return lambda: norm(x + addend, (HIDDEN,), *weights, eps=EPSILON)

        return make

    weight, bias = bfloat16(HIDDEN), bfloat16(HIDDEN)
    for rows in ROWS:
        nbytes = 4 * 2 * rows * HIDDEN + weight.nbytes
        yield from beside_torch(
            f"RMSNorm + residual {rows} x {HIDDEN}",
            nbytes,
            ours(add_rms_norm, rows, weight),
            theirs(functional.rms_norm, rows, weight),
            copy_rate,
        )
        yield from beside_torch(
            f"LayerNorm + residual {rows} x {HIDDEN}",
            nbytes + bias.nbytes,
            ours(add_layer_norm, rows, weight, bias),
            theirs(functional.layer_norm, rows, weight, bias),
            copy_rate,
        )


def activations(copy_rate: float) -> Iterator[Metric]:
    from torch.nn import functional

    from edge.kernels.activation.triton import activated
    from edge.kernels.gated_mlp.triton import gated

    def silu_times(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def of(operator: Callable[..., object], rows: int, columns: int, **options: str) -> Make:
        return lambda _number: partial(operator, bfloat16(rows, columns), **options)

    for rows in ROWS:
        shape = f"{rows} x {COLUMNS}"
        row_bytes = 2 * rows * COLUMNS
        yield from beside_torch(
            f"silu(a) b {shape}",
            3 * row_bytes,
            of(gated, rows, 2 * COLUMNS),
            of(silu_times, rows, 2 * COLUMNS),
            copy_rate,
        )
        for name, theirs in (("silu", functional.silu), ("gelu", functional.gelu)):
            yield from beside_torch(
                f"{name} {shape}",
                2 * row_bytes,
                of(activated, rows, COLUMNS, activation=name),
                of(theirs, rows, COLUMNS),
                copy_rate,
            )


def embeddings(copy_rate: float) -> Iterator[Metric]:
    """Rows of one table, which is much larger than a cache."""
    import torch

    from edge.kernels.embedding.triton import embedding

    table = bfloat16(VOCAB, HIDDEN)
    for rows in ROWS:

        def ids(rows: int = rows) -> torch.Tensor:
            return torch.randint(0, VOCAB, (rows,), dtype=torch.int32, device=DEVICE)

        yield from beside_torch(
            f"embedding {rows} x {HIDDEN}",
            2 * 2 * rows * HIDDEN,
            lambda _number: partial(embedding, ids(), table),
            lambda _number: partial(torch.index_select, table, 0, ids()),
            copy_rate,
        )


def packed_products(copy_rate: float) -> Iterator[Metric]:
    """One row against the copy; more rows against the one."""
    from edge.kernels.matmul_nbits.triton import matmul_nbits

    for outputs, inputs in ((4096, 14336), (8192, 28672)):
        weight = packed_weight(outputs, inputs)
        nbytes = weight.words.nbytes + weight.scales.nbytes
        one_row_us: list[float] = []
        for rows in (1, 2, 4, 16, 32, 64):

            def make(
                _number: int, rows: int = rows, outputs: int = outputs, inputs: int = inputs
            ) -> Callable[[], object]:
                return partial(matmul_nbits, bfloat16(rows, inputs), packed_weight(outputs, inputs))

            name = f"int4 {outputs} x {inputs}, {rows} rows"
            found = moved(name, nbytes, make, copy_rate)
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
            starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
            lengths = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)
            sizes = {"starts": starts, "lengths": lengths, "max_queries": 1}
            for bits in (16, 8, 4):

                def make(
                    _number: int,
                    batch: int = batch,
                    keys: int = keys,
                    bits: int = bits,
                    sizes: dict[str, Any] = sizes,
                ) -> Callable[[], object]:
                    query = bfloat16(batch, HEADS, HEAD_SIZE)
                    return partial(attention, query, make_cache(batch, keys, bits)[0], **sizes)

                nbytes = make_cache(batch, keys, bits)[1]
                name = f"decode {batch} x {keys} keys of {bits} bits"
                yield from moved(name, nbytes, make, copy_rate)


def prompts() -> Iterator[Metric]:
    """TFLOP/s of what is not masked, and the time of torch's attention over ours."""
    import torch
    from torch.nn import functional

    from edge.kernels.attention.triton import AttentionTiles, attention
    from edge.kernels.triton_launch import Launch

    for tokens in (2048, 8192):
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
        lengths = starts[1:].contiguous()
        nbytes = 2 * tokens * (HEADS + 2 * KV_HEADS) * HEAD_SIZE

        def operands(tokens: int = tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            query = bfloat16(tokens, HEADS, HEAD_SIZE)
            keys, values = (bfloat16(1, KV_HEADS, tokens, HEAD_SIZE) for _ in range(2))
            return query, keys, values

        def theirs(_number: int) -> Callable[[], object]:
            query, keys, values = operands()
            return partial(
                functional.scaled_dot_product_attention,
                *(query.transpose(0, 1)[None].contiguous(), keys, values),
                is_causal=True,
                enable_gqa=True,
            )

        torch_ms = median(times_ms(theirs, nbytes))
        operations = 2 * HEADS * HEAD_SIZE * tokens * (tokens + 1)
        for rows, num_warps in ((64, 4), (128, 8)):
            tiles = AttentionTiles(rows=rows, launch=Launch(num_warps=num_warps))
            sizes = {"starts": starts, "lengths": lengths, "max_queries": tokens, "tiles": tiles}

            def ours(
                _number: int, tokens: int = tokens, sizes: dict[str, Any] = sizes
            ) -> Callable[[], object]:
                query = bfloat16(tokens, HEADS, HEAD_SIZE)
                return partial(attention, query, make_cache(1, tokens, 16)[0], **sizes)

            times = times_ms(ours, nbytes)
            name = f"prompt of {tokens}, {rows} rows a tile"
            speeds = [operations / time_ms / 1e9 for time_ms in times]
            ratio = [torch_ms / time_ms for time_ms in times]
            yield Metric(name=f"{name}, speed", unit="TFLOP/s", values=speeds)
            yield Metric(name=f"{name}, torch's time / ours", unit="ratio", values=ratio)


def bfloat16(*shape: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def packed_weight(outputs: int, inputs: int) -> PackedWeight:
    """Int4, of any values."""
    import torch

    from edge.kernels.matmul_nbits.gpu_layout import WORDS, num_tiles
    from edge.kernels.matmul_nbits.triton import PackedWeight

    shape = num_tiles(inputs, 4), outputs, WORDS
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)
    scales = torch.full((inputs // GROUP_SIZE, outputs), 0.01, device=DEVICE)
    return PackedWeight(words=words, scales=scales, bits=4, block_size=GROUP_SIZE, columns=inputs)


def make_cache(
    batch: int, tokens: int, bits: int, *, num_kv_heads: int = KV_HEADS, head_size: int = HEAD_SIZE
) -> tuple[KvCache, int]:
    """A cache in blocks, as models have it, and the bytes in it."""
    import torch

    from edge.backends.triton.paged_kv_cache import BLOCK_TOKENS
    from edge.kernels.kv_cache.gpu_cache import KvCache

    blocks = batch * tokens // BLOCK_TOKENS
    shape = (blocks, num_kv_heads, BLOCK_TOKENS)
    table = torch.randperm(blocks, dtype=torch.int32, device=DEVICE).view(batch, -1)
    if bits == 16:
        keys, values = (bfloat16(*shape, head_size) for _ in range(2))
        cache = KvCache(keys=keys, values=values, block_table=table)
        return cache, keys.nbytes + values.nbytes
    low, high, kind = (-127, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    keys, values = (
        torch.randint(low, high, (*shape, head_size * bits // 8), dtype=kind, device=DEVICE)
        for _ in range(2)
    )
    groups = 1 if bits == 8 else head_size // 32
    scales = torch.full((*shape, groups), 0.01, dtype=torch.float16, device=DEVICE)
    cache = KvCache(
        keys=keys,
        values=values,
        key_scales=scales,
        value_scales=scales.clone(),
        block_table=table,
    )
    return cache, keys.nbytes + values.nbytes + 2 * scales.nbytes


@case.case("Triton kernels beside the GPU's limits")
def gpu_kernels(_given: Given) -> Iterator[Found]:
    """How near to the limits of this machine's GPU do the Triton kernels come?

    Decoding is bound by memory, so it is compared with a copy on the same GPU in the same call;
    what torch has too, prompts among it, is compared with torch. Calls are recorded as a graph, as
    decoding does, over operands that the GPU's cache has no room for.
    """
    if not is_there_a_gpu():
        click.echo(NO_GPU)
        return
    copied = copy()
    rate = median(copied.values)
    yield Found(
        figures=[
            copied,
            *norms(rate),
            *activations(rate),
            *embeddings(rate),
            *packed_products(rate),
            *decoding(rate),
            *prompts(),
        ],
        variant=f"{software()}, bfloat16, int4 in blocks of {GROUP_SIZE}",
        link="none",
        model="none",
    )
