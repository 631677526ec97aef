"""The nodes of experts: rows are sorted by expert, and an expert without rows is not computed.

Each expert is a branch of its own, so its weights are constants that kernels pack like any other,
of whatever kind, and those of an expert without rows are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge.kernels.experts.reference import BEST_OF_GROUP, Routing
from edge.kernels.onnx_graph import OnnxGraph

Expert = Callable[[OnnxGraph, int, str], str]
"""The branch, the expert's number, rows [1, n, hidden] → [1, n, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Which rows go through which experts, as values of a graph: `order_rows` to `mix`.

    A use is one row's of one of its experts; there are rows · top_k. By expert they stand one
    expert's after the other's, and within one by row.
    """

    sources: str
    """[uses + 1]: the row of each, by expert; the last is a row for nothing."""
    starts: str
    """[experts]: where each expert's begin in `sources`."""
    stops: str
    """[experts]: where they end, with a row more where their number is made even."""
    used: str
    """[experts]: how many it has without that one."""
    ranks: str
    """[uses]: where the result of each is, in the order of rows."""
    weights: str
    """[rows, top_k]."""


def experts(
    graph: OnnxGraph,
    x: str,
    logits: str,
    *,
    hidden_size: int,
    num_experts: int,
    routing: Routing,
    expert: Expert,
    correction: str | None = None,
    scales: str | None = None,
) -> str:
    """x [batch, tokens, hidden], logits [batch, tokens, experts] → [batch, tokens, hidden].

    correction, scales [experts]: see the reference.
    """
    routed = order_rows(
        graph,
        logits,
        num_experts=num_experts,
        routing=routing,
        correction=correction,
        scales=scales,
    )
    results = run_experts(
        graph, x, routed, hidden_size=hidden_size, num_experts=num_experts, expert=expert
    )
    return mix(graph, x, results, routed, hidden_size=hidden_size, top_k=routing.top_k)


def order_rows(
    graph: OnnxGraph,
    logits: str,
    *,
    num_experts: int,
    routing: Routing,
    correction: str | None = None,
    scales: str | None = None,
) -> Routed:
    """logits [batch, tokens, experts]; correction, scales [experts]: see the reference.

    In a step of more rows than one each expert gets an even number, one of them for nothing if need
    be: kernels take rows by twos, and a row's result must not depend on who else is there.
    """

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    zero, one, last = integers("0", 0), integers("1", 1), integers("-1", -1)
    top_k = routing.top_k
    table = graph.node("Reshape", logits, integers(f"rows_{num_experts}", -1, num_experts))
    count = integers(f"top_{top_k}", top_k)
    weights, chosen = _route(graph, table, num_experts, routing, correction)
    if scales is not None:
        weights = graph.node("Mul", weights, graph.node("Gather", scales, chosen))
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

    # Places in `each` by expert and by row, and the other way round.
    num_uses = graph.node("Shape", each)
    scalar = graph.constant("experts.step", np.asarray(1, np.int64))
    places = graph.node("Range", axis, graph.node("Squeeze", num_uses), scalar)
    keys = graph.node("Add", graph.node("Mul", each, num_uses), places)
    _, order = graph.nodes("TopK", keys, num_uses, outputs=2, largest=0)
    _, ranks = graph.nodes("TopK", order, num_uses, outputs=2, largest=0)
    return Routed(
        sources=graph.node("Concat", graph.node("Div", order, count), zero, axis=0),
        starts=starts,
        stops=stops,
        used=used,
        ranks=graph.node("Add", ranks, graph.node("Gather", shifts, each)),
        weights=weights,
    )


def run_experts(
    graph: OnnxGraph, x: str, routed: Routed, *, hidden_size: int, num_experts: int, expert: Expert
) -> str:
    """x [batch, tokens, hidden] → [results, hidden], in the order of `sources`, with the rows for
    nothing. Experts of which `used` is 0 are left out, and nothing is read of their weights."""

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    zero = integers("0", 0)
    rows = graph.node("Reshape", x, integers(f"rows_{hidden_size}", -1, hidden_size))
    is_used = graph.node("Greater", routed.used, zero)
    conditions = graph.nodes("Split", is_used, outputs=num_experts, axis=0)
    nothing = graph.constant(f"experts.none_{hidden_size}", np.zeros((0, hidden_size), np.float32))
    made = []
    for number, condition in enumerate(conditions):
        branch, rest = graph.branch(f"expert_{number}"), graph.branch(f"no_expert_{number}")
        place = integers(f"number_{number}", number)
        own = branch.node(
            "Slice",
            routed.sources,
            branch.node("Gather", routed.starts, place),
            branch.node("Gather", routed.stops, place),
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
    return graph.node("Concat", *made, axis=0)


def mix(
    graph: OnnxGraph, x: str, results: str, routed: Routed, *, hidden_size: int, top_k: int
) -> str:
    """The results of `run_experts`, added up for each row by its weights: as x is shaped."""

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    found = graph.node(
        "Reshape",
        graph.node("Gather", results, routed.ranks),
        integers(f"mix_{top_k}_{hidden_size}", -1, top_k, hidden_size),
    )
    weights = graph.node("Unsqueeze", routed.weights, integers("-1", -1))
    mixed = graph.node("ReduceSum", graph.node("Mul", found, weights), integers("1", 1), keepdims=0)
    return graph.node("Reshape", mixed, graph.node("Shape", x))


def _integers(graph: OnnxGraph, name: str, *values: int) -> str:
    return graph.constant(f"experts.{name}", np.asarray(values, np.int64))


def _route(
    graph: OnnxGraph, logits: str, num_experts: int, routing: Routing, correction: str | None
) -> tuple[str, str]:
    """logits [rows, experts] → weights and chosen experts, both [rows, top_k]."""

    def integers(*values: int) -> str:
        name = "_".join(map(str, values))
        return graph.constant(f"experts.route_{name}", np.asarray(values, np.int64))

    def number(value: float) -> str:
        return graph.constant(f"experts.number_{value}", np.asarray(value, np.float32))

    last, count = integers(-1), integers(routing.top_k)
    if routing.scoring == "softmax":
        scores = graph.node("Softmax", logits, axis=-1)
    else:
        scores = graph.node("Sigmoid", logits)
    ranked = scores if correction is None else graph.node("Add", scores, correction)
    if routing.groups > 1:
        groups = integers(-1, routing.groups, num_experts // routing.groups)
        grouped = graph.node("Reshape", ranked, groups)
        best, _ = graph.nodes("TopK", grouped, integers(BEST_OF_GROUP), outputs=2, axis=-1)
        best = graph.node("ReduceSum", best, last, keepdims=0)
        _, order = graph.nodes("TopK", best, integers(routing.chosen_groups), outputs=2, axis=-1)
        hits = graph.node(
            "Equal", graph.node("Unsqueeze", order, last), integers(*range(routing.groups))
        )
        hits = graph.node("ReduceSum", graph.node("Cast", hits, to=_INT64), integers(1), keepdims=0)
        is_chosen = graph.node("Unsqueeze", graph.node("Cast", hits, to=_BOOL), last)
        grouped = graph.node("Where", is_chosen, grouped, number(-np.inf))
        ranked = graph.node("Reshape", grouped, integers(-1, num_experts))
    weights, chosen = graph.nodes("TopK", ranked, count, outputs=2, axis=-1)
    if ranked != scores:
        weights = graph.node("GatherElements", scores, chosen, axis=-1)
    if routing.renormalized:
        total = graph.node("ReduceSum", weights, last, keepdims=1)
        if routing.least_sum:
            total = graph.node("Add", total, number(routing.least_sum))
        weights = graph.node("Div", weights, total)
    if routing.scale != 1.0:
        weights = graph.node("Mul", weights, number(routing.scale))
    return weights, chosen


_INT64, _BOOL = 7, 9
"""Of TensorProto."""
