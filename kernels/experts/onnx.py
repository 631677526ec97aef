"""The nodes of experts: rows are sorted by expert, and an expert without rows is not computed.

Each expert is a branch of its own, so its weights are constants that kernels pack like any other,
of whatever kind, and those of an expert without rows are not read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.kernels.onnx_graph import OnnxGraph

Expert = Callable[[OnnxGraph, int, str], str]
"""The branch, the expert's number, rows [1, n, hidden] → [1, n, hidden]."""


def experts(
    graph: OnnxGraph,
    x: str,
    logits: str,
    *,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    renormalized: bool,
    expert: Expert,
) -> str:
    """x [batch, tokens, hidden], logits [batch, tokens, experts] → [batch, tokens, hidden].

    In a step of more rows than one each expert gets an even number, one of them for nothing if need
    be: kernels take rows by twos, and a row's result must not depend on who else is there.
    """

    def integers(name: str, *values: int) -> str:
        return graph.constant(f"experts.{name}", np.asarray(values, np.int64))

    zero, one, last = integers("0", 0), integers("1", 1), integers("-1", -1)
    rows = graph.node("Reshape", x, integers(f"rows_{hidden_size}", -1, hidden_size))
    table = graph.node("Reshape", logits, integers(f"rows_{num_experts}", -1, num_experts))
    count = integers(f"top_{top_k}", top_k)
    probabilities = graph.node("Softmax", table, axis=-1)
    weights, chosen = graph.nodes("TopK", probabilities, count, outputs=2, axis=-1)
    if renormalized:
        weights = graph.node("Div", weights, graph.node("ReduceSum", weights, last, keepdims=1))
    each = graph.node("Reshape", chosen, last)
    """[rows · top_k]: the expert of each use of one."""
    numbers = integers(f"all_{num_experts}", *range(num_experts))
    hits = graph.node("Equal", graph.node("Unsqueeze", each, one), numbers)
    used = graph.node("ReduceSum", graph.node("Cast", hits, to=_INT64), zero, keepdims=0)
    num_rows = graph.node("Gather", graph.node("Shape", table), zero)
    odd = graph.node("Mod", used, integers("2", 2))
    odd = graph.node("Min", odd, graph.node("Sub", num_rows, one))  # none where a row is alone
    axis = graph.constant("experts.axis", np.asarray(0, np.int64))
    stops = graph.node("CumSum", used, axis)
    starts = graph.node("Sub", stops, used)
    stops = graph.node("Add", stops, odd)
    shifts = graph.node("Sub", graph.node("CumSum", odd, axis), odd)

    # By expert, and within one by row: places in `each` in that order, and the other way round.
    num_uses = graph.node("Shape", each)
    scalar = graph.constant("experts.step", np.asarray(1, np.int64))
    places = graph.node("Range", axis, graph.node("Squeeze", num_uses), scalar)
    keys = graph.node("Add", graph.node("Mul", each, num_uses), places)
    _, order = graph.nodes("TopK", keys, num_uses, outputs=2, largest=0)
    _, ranks = graph.nodes("TopK", order, num_uses, outputs=2, largest=0)
    sources = graph.node("Concat", graph.node("Div", order, count), zero, axis=0)

    is_used = graph.nodes("Split", graph.node("Greater", used, zero), outputs=num_experts, axis=0)
    nothing = graph.constant(f"experts.none_{hidden_size}", np.zeros((0, hidden_size), np.float32))
    made = []
    for number, condition in enumerate(is_used):
        branch, rest = graph.branch(f"expert_{number}"), graph.branch(f"no_expert_{number}")
        place = integers(f"number_{number}", number)
        own = branch.node(
            "Slice",
            sources,
            branch.node("Gather", starts, place),
            branch.node("Gather", stops, place),
        )
        given = branch.node("Unsqueeze", branch.node("Gather", rows, own), zero)
        result = branch.node("Squeeze", expert(branch, number, given), zero)
        made.append(
            graph.node(
                "If",
                condition,
                then_branch=branch.body(result),
                else_branch=rest.body(rest.node("Identity", nothing)),
            )
        )
    results = graph.node("Concat", *made, axis=0)
    ranks = graph.node("Add", ranks, graph.node("Gather", shifts, each))
    found = graph.node(
        "Reshape",
        graph.node("Gather", results, ranks),
        integers(f"mix_{top_k}_{hidden_size}", -1, top_k, hidden_size),
    )
    weighted = graph.node("Mul", found, graph.node("Unsqueeze", weights, last))
    mixed = graph.node("ReduceSum", weighted, one, keepdims=0)
    return graph.node("Reshape", mixed, graph.node("Shape", x))


_INT64 = 7
"""Of TensorProto."""
