"""Products with the blocks of a file, by the operator of `kernels/native`."""

from __future__ import annotations

from collections.abc import Sequence

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
    return _node(graph, x, "", [blocks], form, rows, columns, accuracy, holds=holds)


def chosen_block_products(
    graph: OnnxGraph,
    x: str,
    chosen: str,
    matrices: Sequence[str],
    form: BlockForm,
    *,
    rows: int,
    columns: int,
    accuracy: Accuracy,
) -> str:
    """x [..., columns] of some rows, chosen [uses] → [1, uses, rows]: the product of each use, of
    which a row has equally many, with the matrix of its number. −1: of none, which gives 0.

    matrices: the blocks of each; the operator holds a copy. Those that nobody chose are not read.
    The bits are those of `block_product`.
    """
    return _node(graph, x, chosen, matrices, form, rows, columns, accuracy, holds=True)


def _node(
    graph: OnnxGraph,
    x: str,
    chosen: str,
    matrices: Sequence[str],
    form: BlockForm,
    rows: int,
    columns: int,
    accuracy: Accuracy,
    *,
    holds: bool,
) -> str:
    return graph.node(
        "BlockProduct", x, chosen, *matrices, domain=EDGE, type=form.number,
        matrices=len(matrices), rows=rows, columns=columns, accurate=int(accuracy == "high"),
        holds=int(holds),
    )  # fmt: skip
