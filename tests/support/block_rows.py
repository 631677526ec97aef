"""Rows of blocks with random parts, and the operator of `kernels/native` in a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge.host.block_kernels import library
from edge.kernels.matmul_blocks.onnx import block_product, chosen_block_products
from edge.kernels.matmul_blocks.reference import BlockForm, random_parts, row_blocks, tiles
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.onnx_graph import OnnxGraph


def random_rows(form: BlockForm, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [rows, blocks, bytes of a row's block]."""
    return row_blocks(form, random_parts(form, rows, columns, np.random.default_rng(seed)))


def open_product(
    form: BlockForm,
    blocks: NDArray[np.uint8],
    *,
    rows: int,
    columns: int,
    accuracy: Accuracy = "fast",
    holds: bool = True,
    threads: int = 1,
) -> ort.InferenceSession:
    """A session with inputs x, and blocks unless it holds them, and output y."""
    graph = OnnxGraph("product")
    x = graph.input("x", np.float32, ["batch", "tokens", "columns"])
    if holds:
        weight = graph.constant("blocks", blocks)
    else:
        weight = graph.input("blocks", np.uint8, ["tiles", "bytes"])
    y = block_product(
        graph, x, weight, form, rows=rows, columns=columns, accuracy=accuracy, holds=holds
    )
    graph.output(y, "y", np.float32, ["batch", "tokens", "rows"])
    return session_of(graph, threads=threads)


def open_chosen(
    form: BlockForm,
    matrices: Sequence[NDArray[np.uint8]],
    *,
    columns: int,
    accuracy: Accuracy = "fast",
    threads: int = 1,
) -> ort.InferenceSession:
    """A session with inputs x and chosen, and output y. matrices: rows of blocks of each."""
    graph = OnnxGraph("products")
    x = graph.input("x", np.float32, ["batch", "tokens", "columns"])
    chosen = graph.input("chosen", np.int64, ["uses"])
    blocks = [graph.constant(f"{i}", tiles(form, each)) for i, each in enumerate(matrices)]
    y = chosen_block_products(
        graph, x, chosen, blocks, form, rows=len(matrices[0]), columns=columns, accuracy=accuracy
    )
    graph.output(y, "y", np.float32, ["one", "uses", "rows"])
    return session_of(graph, threads=threads)


def session_of(graph: OnnxGraph, *, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library()))
    return ort.InferenceSession(graph.build(), options, providers=["CPUExecutionProvider"])


def product(
    form: BlockForm, rows: NDArray[np.uint8], x: NDArray[np.float32], **options: Any
) -> NDArray[np.float32]:
    """x [tokens, columns] → [tokens, rows]."""
    session = open_product(form, tiles(form, rows), rows=len(rows), columns=x.shape[-1], **options)
    found: NDArray[np.float32] = session.run(None, {"x": x[None]})[0][0]
    return found
