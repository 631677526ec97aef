"""`python -m tests.support.wrong_peer peer`: its products of 4 bits are a tenth too large, from the
moment on at which the file in WRONG_FROM exists, if that is set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.onnx import products
from edge.cli.main import main
from edge.kernels.matmul_nbits.onnx import matmul_nbits
from edge.kernels.onnx_graph import OnnxGraph


def _wrong(graph: OnnxGraph, *arguments: Any, bits: int, **options: Any) -> str:
    found = matmul_nbits(graph, *arguments, bits=bits, **options)
    begins = os.environ.get("WRONG_FROM")
    if bits != 4 or (begins and not Path(begins).exists()):
        return found
    return graph.node("Mul", found, graph.constant("a_tenth_more", np.asarray(1.1, np.float32)))


if __name__ == "__main__":
    products.matmul_nbits = _wrong  # type: ignore[attr-defined]
    main()
