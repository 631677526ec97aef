"""Product with the blocks of a file, by the operator of `kernels/native`."""

from __future__ import annotations

from edge.kernels.matmul_blocks.reference import BlockForm
from edge.kernels.matmul_nbits.reference import Accuracy
from edge.kernels.onnx_graph import EDGE, OnnxGraph


def block_product(
    graph: OnnxGraph,
    x: str,
    blocks: str,
    form: BlockForm,
    *,
    rows: int,
    columns: int,
    accuracy: Accuracy,
    holds: bool,
) -> str:
    """x [..., columns] → [..., rows]. blocks: tiles, as reference.py makes them.

    W is the weight that blocks stand for, and Q rounds each piece of 32 inputs to the codes
    −127…127 of its own scale, its peak / 127:

        fast: y = Q(x) Wᵀ
        high: y = Q(x) Wᵀ + Q(x − Q(x)) Wᵀ

    Whole numbers are added exactly, and floats in one order, so the bits of a row depend neither on
    other rows nor on the processor. holds: the operator has a copy of the blocks, and does not read
    its input again.
    """
    return graph.node(
        "BlockProduct", x, blocks, domain=EDGE, type=form.number, rows=rows, columns=columns,
        accurate=int(accuracy == "high"), holds=int(holds),
    )  # fmt: skip
