"""How long attention itself takes over each number format of keys and values, without a model.

python -m edge.demos.bench.kv_attention --append

One token attends to those before it, in some layers one after the other, by one thread. In int4 the
operator works over codes, and nodes around it put in what these lack of the first and the newest
tokens: so int4 is timed with these nodes and without them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge.demos.bench import results
from edge.demos.bench.options import append_option
from edge.demos.bench.results import Metric
from edge.kernels.attention.onnx import AttentionNames, CacheNames, attention
from edge.kernels.attention.reference import PackedAttention
from edge.kernels.kv_cache.cache_size import NEWEST_TOKENS, cache_row, remainder_shape
from edge.kernels.onnx_graph import OnnxGraph

QUESTION = "how long attention over a format of keys and values takes"
_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads of one layer, and the model that they are of."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_size: int


MODELS = (
    Heads(model="heads of SmolLM2 135M", num_heads=9, num_kv_heads=3, head_size=64),
    Heads(model="heads of W", num_heads=32, num_kv_heads=4, head_size=64),
)


class Layers:
    """A graph of layers of attention, bound to caches of their own."""

    def __init__(self, heads: Heads, tokens: int, bits: int | None, newest: int) -> None:
        random = np.random.default_rng(0)
        size, count = heads.head_size, heads.num_kv_heads
        width = (heads.num_heads + 2 * count) * size
        dtype, elements = cache_row(size, bits)
        row: list[int | str] = ["batch", count, "context", elements]
        graph = OnnxGraph("attention")
        angles: list[int | str] = ["context", size // 2]
        names = AttentionNames(
            cos=graph.input("cos", np.float32, angles),
            sin=graph.input("sin", np.float32, angles),
            positions=graph.input("positions", np.int64, ["batch", "tokens"]) if newest else "",
            lengths=graph.input("lengths", np.int32, ["batch"]),
            total=graph.input("total", np.int32, []),
        )
        qkv = graph.input("qkv", np.float32, ["batch", "tokens", width])
        arrays: dict[str, NDArray[Any]] = {
            "cos": np.ones((tokens, size // 2), np.float32),
            "sin": np.zeros((tokens, size // 2), np.float32),
            "positions": np.asarray([[tokens - 1]]),
            "lengths": np.asarray([tokens - 1], np.int32),
            "total": np.asarray(tokens, np.int32),
            "qkv": random.standard_normal((1, 1, width), np.float32),
        }
        outputs: list[tuple[str, NDArray[Any]]] = []
        beside = remainder_shape(count, size, has_soft_cap=False)
        for layer in range(_LAYERS):
            for name in ("keys", "values"):
                graph.input(f"{name}_{layer}", dtype, row)
                arrays[f"{name}_{layer}"] = np.zeros((1, count, tokens, elements), dtype)
                if bits:
                    graph.input(f"{name}_scales_{layer}", np.float32, [1, count, 1, size])
                    scales = np.full((1, count, 1, size), 0.5, np.float32)
                    arrays[f"{name}_scales_{layer}"] = scales
            remainders = f"remainders_{layer}" if newest else ""
            if newest:
                graph.input(remainders, np.float32, ["batch", *beside])
                arrays[remainders] = np.zeros((1, *beside), np.float32)
            output, *present = attention(
                graph,
                qkv,
                CacheNames(
                    keys=f"keys_{layer}",
                    values=f"values_{layer}",
                    bits=bits,
                    key_scales=f"keys_scales_{layer}" if bits else "",
                    value_scales=f"values_scales_{layer}" if bits else "",
                    remainders=remainders,
                    newest=newest,
                ),
                names,
                PackedAttention(
                    num_heads=heads.num_heads,
                    num_kv_heads=count,
                    head_size=size,
                    turned_elements=size,
                ),
            )
            shape: list[int | str] = ["batch", "tokens", heads.num_heads * size]
            graph.output(output, f"output_{layer}", np.float32, shape)
            made = np.zeros((1, 1, heads.num_heads * size), np.float32)
            outputs.append((f"output_{layer}", made))
            places = ("keys", "values", "remainders")
            for value, name in zip(present, places, strict=False):
                array = arrays[f"{name}_{layer}"]  # as peers do, present is bound onto past
                graph.output(value, f"present_{name}_{layer}", array.dtype, list(array.shape))
                outputs.append((f"present_{name}_{layer}", array))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(
            graph.build(), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        for name in graph.input_names:
            each = arrays[name]
            self._binding.bind_input(name, "cpu", 0, each.dtype.type, each.shape, each.ctypes.data)
        for name, each in outputs:
            self._binding.bind_output(name, "cpu", 0, each.dtype.type, each.shape, each.ctypes.data)
        self._held = arrays, outputs

    def microseconds(self) -> float:
        """Time of one layer."""
        begin = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return (time.perf_counter() - begin) / _LAYERS * 1e6


@click.command()
@click.option("--tokens", type=click.IntRange(2), default=400, show_default=True, help="Before.")
@click.option("--rounds", type=int, default=300, show_default=True)
@append_option
def main(tokens: int, rounds: int, append: bool) -> None:
    """Microseconds of a layer, for each format in turn."""
    for heads in MODELS:
        formats = {
            "float32": Layers(heads, tokens, None, 0),
            "int8": Layers(heads, tokens, 8, 0),
            "int4, its codes alone": Layers(heads, tokens, 4, 0),
            "int4": Layers(heads, tokens, 4, NEWEST_TOKENS),
        }
        for each in formats.values():
            each.microseconds()
        taken = [
            {name: each.microseconds() for name, each in formats.items()} for _ in range(rounds)
        ]
        for name in formats:
            print(f"{heads.model}, {name}")
            results.publish(
                [Metric(name="a layer", unit="us", values=[each[name] for each in taken])],
                question=QUESTION,
                variant=f"KV {name}, 1 thread, 1 token after {tokens}",
                link="none",
                model=heads.model,
                keep=append,
            )


if __name__ == "__main__":
    sys.exit(main())
