"""Which tiles are fastest for a model's products on this GPU?

python -m demos.bench.gpu_tuning MODEL --dtype int4

Measures a few dozen candidates for each shape of product, and keeps the fastest where `edge peer`
looks for them. Without a table, peers use defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from demos.bench.gpu_kernels import DEVICE, NO_GPU, bfloat16, is_there_a_gpu, times_ms

if TYPE_CHECKING:
    from edge.backends.triton_tuning import ProductShape, Tiles
    from edge.formats import WeightFormat


def candidates(shape: ProductShape) -> Iterator[Tiles]:
    from kernels.matmul.triton import FEW_ROWS
    from kernels.triton_launch import GemmTiles, GemvTiles, Launch, gemm_tiles

    if shape.rows <= FEW_ROWS:
        for outputs, inputs, warps in product((2, 4, 8, 16), (512, 1024, 2048), (2, 4, 8)):
            yield GemvTiles(outputs=outputs, inputs=inputs, launch=Launch(num_warps=warps))
        return
    usual = gemm_tiles(shape.rows, shape.outputs, shape.inputs, element_bytes=2, processors=132)
    for outputs, inputs, splits, warps in product((32, 64, 128), (64, 128), (1, 2, 4, 8), (4, 8)):
        yield GemmTiles(
            rows=usual.rows,
            outputs=outputs,
            inputs=inputs,
            splits=splits,
            launch=Launch(num_warps=warps, num_stages=3),
        )


def fastest(shape: ProductShape, block_size: int) -> tuple[Tiles, float]:
    """The tiles, and the time of the defaults over theirs."""
    import torch

    from kernels.matmul.triton import matmul
    from kernels.matmul_nbits.triton import PackedWeight, matmul_nbits

    x = bfloat16(shape.rows, shape.inputs)
    weight: PackedWeight | torch.Tensor = bfloat16(shape.outputs, shape.inputs)
    if shape.bits is not None:
        blocks = -(-shape.inputs // block_size)
        words = blocks * block_size * shape.bits // 32
        weight = PackedWeight(
            words=torch.zeros((shape.outputs, words), dtype=torch.int32, device=DEVICE),
            scales=torch.ones((blocks, shape.outputs), dtype=torch.float16, device=DEVICE),
            bits=shape.bits,
            block_size=block_size,
            columns=shape.inputs,
        )

    def time_ms(tiles: Tiles | None) -> float:
        def call() -> object:
            if isinstance(weight, PackedWeight):
                return matmul_nbits(x, weight, tiles=tiles)
            return matmul(x, weight, tiles=tiles)

        try:
            times = sorted(times_ms(call))
        except Exception:  # more shared memory or registers than there are, by many names
            return float("inf")
        return times[len(times) // 2]

    best = min(candidates(shape), key=time_ms)
    return best, time_ms(None) / time_ms(best)


def shapes(path: Path, chosen: WeightFormat) -> list[ProductShape]:
    """The products of a whole model on one peer."""
    from edge.backends.triton_tuning import ROWS, ProductShape
    from edge.checkpoint import Checkpoint

    with Checkpoint.open(path) as checkpoint:
        spec = checkpoint.spec
    heads = spec.num_heads * spec.head_size
    qkv = heads + 2 * spec.num_kv_heads * spec.head_size
    sides = {
        (qkv, spec.hidden_size),
        (spec.hidden_size, heads),
        (2 * spec.ffn_columns, spec.hidden_size),
        (spec.hidden_size, spec.ffn_columns),
        (spec.vocab_size, spec.hidden_size),
    }
    return [
        ProductShape(bits=chosen.bits, rows=rows, outputs=outputs, inputs=inputs)
        for (outputs, inputs), rows in product(sorted(sides), ROWS)
    ]


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--dtype", type=click.Choice(["int4", "int8"]), default="int4", show_default=True)
@click.option("--block-size", type=int, default=32, show_default=True)
def main(model: Path, dtype: str, block_size: int) -> None:
    """Measure tiles for a checkpoint's products on this machine's GPU, and keep the fastest."""
    if not is_there_a_gpu():
        print(NO_GPU)
        return
    from edge.backends.triton_device import Device
    from edge.backends.triton_tuning import TuningTable, keep_tuning
    from edge.formats import weight_format

    found = {}
    for shape in shapes(model, weight_format(dtype, block_size)):
        found[shape], gain = fastest(shape, block_size)
        print(f"{dataclasses.asdict(shape)}: {gain:.2f} times as fast as the defaults", flush=True)
    print(f"kept in {keep_tuning(Device(), TuningTable(products=found))}")


if __name__ == "__main__":
    sys.exit(main())
