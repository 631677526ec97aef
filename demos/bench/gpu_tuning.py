"""The fastest tiles of kernels on a GPU, measured and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import click

from edge.demos.bench import case
from edge.demos.bench.gpu import DEVICE, NO_GPU, is_there_a_gpu, times_ms
from edge.demos.bench.gpu_kernels import bfloat16, make_cache
from edge.weights.formats import KV_DTYPES

if TYPE_CHECKING:
    from edge.backends.triton.tuning import AttentionShape, ProductShape
    from edge.kernels.attention.triton import AttentionTiles
    from edge.kernels.kv_cache.gpu_cache import KvCache
    from edge.kernels.matmul_nbits.triton import ProductTiles
    from edge.models.spec import ModelSpec
    from edge.weights.formats import WeightFormat

Kind = TypeVar("Kind")

KEYS = 8192
"""That attention is measured over."""


def candidates(shape: ProductShape) -> Iterator[ProductTiles]:
    from edge.kernels.matmul_nbits.triton import ProductTiles
    from edge.kernels.triton_launch import SMALLEST_DOT, Launch, padded

    rows = {8, SMALLEST_DOT} if shape.rows == 1 else {padded(shape.rows)}
    options = product(sorted(rows), (64, 128), (2, 4, 8), (2, 3, 4), (1, 2, 4, 8, 16))
    for each, outputs, warps, stages, splits in options:
        launch = Launch(num_warps=warps, num_stages=stages)
        yield ProductTiles(rows=each, outputs=outputs, splits=splits, launch=launch)


def fastest(shape: ProductShape, block_size: int) -> tuple[ProductTiles | None, float]:
    """As `fastest_of`."""
    import torch

    from edge.kernels.matmul_nbits.gpu_layout import WORDS, num_tiles
    from edge.kernels.matmul_nbits.triton import PackedWeight, matmul_nbits

    blocks = -(-shape.inputs // block_size)
    words = (num_tiles(blocks * block_size, shape.bits), shape.outputs, WORDS)

    @cache
    def operands(_number: int) -> tuple[torch.Tensor, PackedWeight]:
        return bfloat16(shape.rows, shape.inputs), PackedWeight(
            words=torch.zeros(words, dtype=torch.int32, device=DEVICE),
            scales=torch.ones((blocks, shape.outputs), dtype=torch.float16, device=DEVICE),
            bits=shape.bits,
            block_size=block_size,
            columns=shape.inputs,
        )

    def call(number: int, tiles: ProductTiles | None) -> object:
        return matmul_nbits(*operands(number), tiles=tiles)

    return fastest_of(candidates(shape), call, shape.outputs * shape.inputs * shape.bits // 8)


def attention_candidates(shape: AttentionShape) -> Iterator[AttentionTiles]:
    from edge.kernels.attention.triton import AttentionTiles
    from edge.kernels.triton_launch import SMALLEST_DOT, Launch, padded

    most = padded(shape.queries * shape.group, at_least=SMALLEST_DOT)
    sides = [rows for rows in (16, 32, 64, 128) if rows <= most]
    for rows, keys, is_wide, stages in product(sides, (32, 64, 128), (False, True), (2, 3)):
        warps = (2 if rows == SMALLEST_DOT else 4) << is_wide
        yield AttentionTiles(
            rows=rows, keys=keys, launch=Launch(num_warps=warps, num_stages=stages)
        )


def fastest_attention(
    shape: AttentionShape, num_kv_heads: int
) -> tuple[AttentionTiles | None, float]:
    """As `fastest_of`, over `KEYS` keys and as many queries as an entry of the table serves."""
    import torch

    from edge.kernels.attention.triton import attention

    @cache
    def operands(_number: int) -> tuple[torch.Tensor, KvCache, int]:
        held, nbytes = make_cache(
            1, KEYS, shape.bits or 16, num_kv_heads=num_kv_heads, head_size=shape.head_size
        )
        query = bfloat16(shape.queries, num_kv_heads * shape.group, shape.head_size)
        return query, held, nbytes

    sizes = {
        "starts": torch.tensor([0, shape.queries], dtype=torch.int32, device=DEVICE),
        "lengths": torch.tensor([KEYS], dtype=torch.int32, device=DEVICE),
        "max_queries": shape.queries,
    }

    def call(number: int, tiles: AttentionTiles | None) -> object:
        query, held, _nbytes = operands(number)
        return attention(query, held, tiles=tiles, **sizes)

    return fastest_of(attention_candidates(shape), call, operands(0)[-1])


def fastest_of(
    candidates: Iterable[Kind], call: Callable[[int, Kind | None], object], nbytes: int
) -> tuple[Kind | None, float]:
    """The tiles, and the time of the defaults over theirs; None where the defaults are best.

    call: with the operands of that number, of `nbytes`, and these tiles.
    """

    def time_ms(tiles: Kind | None) -> float:
        try:
            return median(times_ms(lambda number: partial(call, number, tiles), nbytes))
        except Exception:  # more shared memory or registers than there are, by many names
            return float("inf")

    default_ms = time_ms(None)
    best_ms, best = default_ms, None
    for each in candidates:
        if (now_ms := time_ms(each)) < best_ms:
            best_ms, best = now_ms, each
    return best, default_ms / best_ms if best is not None else 1.0


def shapes(spec: ModelSpec, chosen: WeightFormat) -> list[ProductShape]:
    """The products of a whole model on one peer."""
    from edge.backends.triton.tuning import ROWS, ProductShape

    mixer, columns = spec.attention, spec.kinds[0].feed_forward.columns
    heads = mixer.num_heads * mixer.head_size
    qkv = heads + 2 * mixer.num_kv_heads * mixer.head_size
    sides = {
        (qkv, spec.hidden_size),
        (spec.hidden_size, heads),
        (2 * columns, spec.hidden_size),
        (spec.hidden_size, columns),
        (spec.vocab_size, spec.hidden_size),
    }
    return [
        ProductShape(bits=kind.bits, rows=rows, outputs=outputs, inputs=inputs)
        for kind, (outputs, inputs), rows in product(chosen.recipe.kinds, sorted(sides), ROWS)
        if kind.bits is not None
    ]


def attention_shapes(spec: ModelSpec, kv_bits: int | None) -> list[AttentionShape]:
    from edge.backends.triton.tuning import QUERIES, AttentionShape

    return [
        AttentionShape(
            bits=kv_bits,
            queries=queries,
            group=spec.attention.num_heads // spec.attention.num_kv_heads,
            head_size=spec.attention.head_size,
        )
        for queries in QUERIES
    ]


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@case.choice("--dtype", ("int4", "int8"), "int4")
@case.block_size(32)
@case.choice("--kv-dtype", KV_DTYPES, "float32")
def gpu_tuning(model: Path, dtype: str, block_size: int, kv_dtype: str) -> None:
    """Which tiles are fastest for the products and attention of a checkpoint on this GPU?

    Measures a few dozen candidates for each shape, and keeps the fastest where `edge peer` looks
    for them. Without a table, peers use defaults. Cached keys and values that are not rounded, a
    GPU keeps as bfloat16.
    """
    if not is_there_a_gpu():
        click.echo(NO_GPU)
        return
    from edge.backends.triton.device import Device
    from edge.backends.triton.tuning import TuningTable, keep_tuning
    from edge.weights.checkpoint import Checkpoint
    from edge.weights.formats import weight_format

    with Checkpoint.open(model) as checkpoint:
        spec = checkpoint.spec
    products: dict[ProductShape, ProductTiles] = {}
    for shape in shapes(spec, weight_format(spec, dtype, block_size)):
        tiles, gain = fastest(shape, block_size)
        _show(shape, gain)
        if tiles is not None:
            products[shape] = tiles
    attentions: dict[AttentionShape, AttentionTiles] = {}
    for attended in attention_shapes(spec, {"int8": 8, "int4": 4}.get(kv_dtype)):
        attention_tiles, gain = fastest_attention(attended, spec.attention.num_kv_heads)
        _show(attended, gain)
        if attention_tiles is not None:
            attentions[attended] = attention_tiles
    table = TuningTable(products=products, attentions=attentions)
    print(f"kept in {keep_tuning(Device(), table)}")


def _show(shape: ProductShape | AttentionShape, gain: float) -> None:
    print(f"{dataclasses.asdict(shape)}: {gain:.2f} times as fast as the defaults", flush=True)
