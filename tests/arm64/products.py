"""Products on this processor, as a file of numpy on standard output.

Weights and inputs are the same on each machine that runs this.
"""

from __future__ import annotations

import io
import itertools
import sys
from typing import Any

import numpy as np

from edge.backends.onnx.runtime import ort
from edge.backends.ort.backend import _prepare_process, _session_options
from edge.kernels.cases import Draw
from edge.kernels.matmul.onnx import matmul
from edge.kernels.matmul_nbits.onnx import matmul_nbits
from edge.kernels.matmul_nbits.reference import Accuracy, quantize
from edge.kernels.onnx_graph import OnnxGraph

ROWS, COLUMNS = 256, 512
TOKENS = (1, 16)
BITS = (8, 4, 2)
ACCURACIES: tuple[Accuracy, ...] = ("fast", "high")


def products() -> dict[str, np.ndarray]:
    """Each product, by format and tokens."""
    draw = Draw(0)
    weight = draw.normal(ROWS, COLUMNS) * np.float32(COLUMNS**-0.5)
    inputs = {tokens: draw.normal(1, tokens, COLUMNS) for tokens in TOKENS}
    graph = OnnxGraph("products")
    found: dict[str, str] = {}
    for tokens, x in inputs.items():
        name = graph.input(f"x{tokens}", np.dtype(np.float32), x.shape)
        shape = (1, tokens, ROWS)
        key = f"float32, {tokens}"
        found[key] = matmul(graph, name, graph.constant("weight", weight))
        graph.output(found[key], key, np.float32, shape)
        for bits, accuracy in itertools.product(BITS, ACCURACIES):
            matrix = quantize(weight, bits=bits, block_size=64)
            key = f"{bits} bits {accuracy}, {tokens}"
            found[key] = matmul_nbits(
                graph,
                name,
                graph.constant(f"codes {key}", matrix.codes),
                graph.constant(f"scales {key}", matrix.scales),
                rows=ROWS,
                columns=COLUMNS,
                bits=bits,
                block_size=64,
                accuracy=accuracy,
            )
            graph.output(found[key], key, np.float32, shape)
    _prepare_process(1)
    session = ort.InferenceSession(
        graph.build(), _session_options(), providers=["CPUExecutionProvider"]
    )
    feeds = {f"x{tokens}": x for tokens, x in inputs.items()}
    return dict(zip(found, session.run(list(found), feeds), strict=True))


if __name__ == "__main__":
    file = io.BytesIO()
    arrays: dict[str, Any] = products()
    np.savez(file, **arrays)
    sys.stdout.buffer.write(file.getvalue())
