"""The nodes of experts: an expert without rows is not computed, and its weights are not read.

Either each expert is a branch of its own, whose weights of any kind are constants that kernels
pack; rows are sorted by expert then. Or all of them are one node, which wants their weights in one
piece and in blocks. Or a product takes the matrices of all experts, and the number of each use's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.kernels.experts.reference import BEST_OF_GROUP, Routing
from edge.kernels.matmul_nbits.onnx import INTEGER_ACTIVATIONS
from edge.kernels.onnx_graph import CONTRIB, OnnxGraph

Expert = Callable[[OnnxGraph, int, str], str]
"""The branch, the expert's number, rows [1, n, hidden] → [1, n, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Which rows go through which experts, as values of a graph: `order_rows` to `mix`.

    A use is one row's of one of its experts; there are rows · top_k. By expert they stand one
    expert's after the other's, and within one by row. Where the graph has only some of the experts,
    those are counted from the first of them, and uses of others stand last.
    """

    sources: str
    """[uses + 1]: the row of each, by expert; the last is a row for nothing."""
    starts: str
    """[experts that it has]: where each expert's begin in `sources`."""
    stops: str
    """[the same]: where they end, with a row more where their number is made even."""
    used: str
    """[the same]: how many it has without that one."""
    ranks: str
    """[uses]: where the result of each is, in the order of rows. Where the graph has only some of
    the experts, the first result is of all others, and 0."""
    weights: str
    """[rows, top_k]."""


def experts(
    graph: OnnxGraph,
    x: str,
    logits: str,
    correction: str | None = None,
    scales: str | None = None,
    *,
    hidden_size: int,
    num_experts: int,
    routing: Routing,
    expert: Expert,
    held: range | None = None,
) -> str:
    """The weighted sum of a token's experts: x [batch, tokens, hidden], logits [batch, tokens,
    experts] → [batch, tokens, hidden].

    held: the experts of this graph, which computes and sums them one after the other; None: all
    experts. correction, scales [experts]: see the reference.
    """
    held = held or range(num_experts)
    routed = order_rows(
        graph,
        logits,
        num_experts=num_experts,
        held=held,
        routing=routing,
        correction=correction,
        scales=scales,
    )
    results = run_experts(
        graph,
        x,
        routed,
        hidden_size=hidden_size,
        held=held,
        is_part=len(held) < num_experts,
        expert=expert,
    )
    return mix(graph, x, results, routed, hidden_size=hidden_size, top_k=routing.top_k)


def joined_experts(
    graph: OnnxGraph,
    x: str,
    logits: str,
    *,
    hidden_size: int,
    num_experts: int,
    routing: Routing,
    each: Callable[[str, str], str],
    held: range,
    correction: str | None = None,
    scales: str | None = None,
) -> str:
    """The same as `experts`, with products that take the matrices of all experts that are held.

    each(x, chosen [uses]) → [1, uses, hidden]: what each use's expert gives, counted from the first
    that is held; −1 is one of another shard, whose result is not used.
    """
    weights, chosen = choose(graph, logits, num_experts, routing, correction, scales)
    numbers = graph.node("Reshape", chosen, _integers(graph, "-1", -1))
    if len(held) < num_experts:
        numbers, is_own = _own(graph, numbers, held)
        numbers = graph.node("Where", is_own, numbers, _integers(graph, "-1", -1))
        of_rows = graph.node(
            "Reshape", is_own, _integers(graph, f"of_{routing.top_k}", -1, routing.top_k)
        )
        nothing = graph.constant("experts.no_weight", np.asarray(0, np.float32))
        weights = graph.node("Where", of_rows, weights, nothing)
    results = each(x, numbers)
    return _add_up(graph, x, results, weights, hidden_size=hidden_size, top_k=routing.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedWeights:
    """Those of all experts of a layer as values of a graph: silu(gate) · up, and a product more."""

    gate_up_codes: str
    """uint8 [experts, 2n, hidden · bits / 8]: a row of gate and one of up in turn."""
    gate_up_scales: str
    """float32 [experts, 2n, blocks], two blocks or more."""
    down_codes: str
    """uint8 [experts, hidden, n · bits / 8]."""
    down_scales: str
    """float32 [experts, hidden, blocks], two blocks or more."""
    bits: int
    """4 or 8."""
    block_size: int
    """hidden and n are multiples of it."""


def in_turn(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of gate, and then those of up [2n, ...], as `StackedWeights` has them [2n, size]."""
    return rows.reshape(2, len(rows) // 2, -1).swapaxes(0, 1).reshape(len(rows), -1)


def stacked_experts(
    graph: OnnxGraph,
    x: str,
    logits: str,
    *,
    hidden_size: int,
    num_experts: int,
    routing: Routing,
    stacked: StackedWeights,
    held: range | None = None,
    correction: str | None = None,
    scales: str | None = None,
) -> str:
    """The same as `experts`, with products that round their inputs to 8 bits, in one node.

    With several threads each computes some of the experts alone, where branches are computed one
    after the other with all threads at each product. A layer of 48 experts of 1536 x 768 of which 4
    compute, int4 in blocks of 32, one thread: 0.74 ms where branches take 1.19 for one token, 1.79
    where they take 2.45 for two, 14.2 where they take 15.9 for 32, but 70.8 where they take 66.0
    for 256 (AMD EPYC with AVX-512 VNNI).

    The node is given one row for each use of an expert, so that it adds up nothing: in which order
    it does that depends on who else is in the step. Their numbers are made even as in `order_rows`.
    """

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    zero, last = integers("0", 0), integers("-1", -1)
    held = held or range(num_experts)
    weights, chosen = choose(graph, logits, num_experts, routing, correction, scales)
    rows = graph.node("Reshape", x, integers(f"rows_{hidden_size}", -1, hidden_size))
    each = graph.node("Reshape", chosen, last)
    sizes = _step_sizes(graph, rows, routing.top_k)
    num_uses = sizes.num_uses
    ranks = own_rows = None
    count = integers(f"top_{routing.top_k}", routing.top_k)
    if len(held) < num_experts:
        each, is_own = _own(graph, each, held)
        own_uses = graph.node("Reshape", graph.node("NonZero", is_own), last)
        each = graph.node("Gather", each, own_uses)
        num_uses = graph.node("Shape", each)
        own_rows = graph.node("Concat", graph.node("Div", own_uses, count), zero, axis=0)
        num_own = graph.node("CumSum", graph.node("Cast", is_own, to=_INT64), _axis(graph))
        ranks = graph.node("Where", is_own, num_own, zero)
    off_on = graph.constant("experts.off_on", np.asarray([0, 1], np.float32))
    depth = integers(f"count_{len(held)}", len(held))

    several, alone = graph.branch("several_rows"), graph.branch("one_row")
    numbers = integers(f"all_{len(held)}", *range(len(held)))
    hits = several.node("Equal", several.node("Unsqueeze", each, integers("1", 1)), numbers)
    used = several.node("ReduceSum", several.node("Cast", hits, to=_INT64), zero, keepdims=0)
    odd = several.node("NonZero", several.node("Mod", used, integers("2", 2)))
    given = several.node("Concat", each, several.node("Reshape", odd, last), axis=0)
    """[uses, and more]: the expert of each; what is more is for nothing, with a row of any."""
    step = graph.constant("experts.step", np.asarray(1, np.int64))
    num_given = several.node("Squeeze", several.node("Shape", given))
    places = several.node("Range", _axis(graph), num_given, step)
    if own_rows is None:
        sources = several.node("Mod", several.node("Div", places, count), sizes.num_rows)
    else:
        sources = several.node("Gather", own_rows, several.node("Min", places, num_uses))
    the_row = integers(f"row_{routing.top_k}", *[0] * routing.top_k)
    if own_rows is not None:
        the_row = alone.node("Sub", each, each)
    own, hot = graph.nodes(
        "If",
        sizes.are_several,
        outputs=2,
        then_branch=several.body(
            several.node("Gather", rows, sources),
            several.node("OneHot", given, depth, off_on),
        ),
        else_branch=alone.body(
            alone.node("Gather", rows, the_row),
            alone.node("OneHot", each, depth, off_on),
        ),
    )
    results = graph.node(
        "QMoE", own, hot,
        stacked.gate_up_codes, stacked.gate_up_scales, "",
        stacked.down_codes, stacked.down_scales, "",
        "", "", "", "", "", "", hot,
        domain=CONTRIB, k=1, normalize_routing_weights=0,
        activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0,
        expert_weight_bits=stacked.bits, block_size=stacked.block_size,
        accuracy_level=INTEGER_ACTIVATIONS,
    )  # fmt: skip
    results = graph.node("Slice", results, zero, num_uses)
    if ranks is not None:
        results = graph.node("Concat", _nothing(graph, 1, hidden_size), results, axis=0)
        results = graph.node("Gather", results, ranks)
    return _add_up(graph, x, results, weights, hidden_size=hidden_size, top_k=routing.top_k)


def order_rows(
    graph: OnnxGraph,
    logits: str,
    *,
    num_experts: int,
    held: range,
    routing: Routing,
    correction: str | None = None,
    scales: str | None = None,
) -> Routed:
    """logits [batch, tokens, experts]; held: those that the graph has; correction, scales
    [experts]: see the reference.

    In a step of several rows each expert gets an even number of rows, one of them a dummy if need
    be: kernels take rows by twos, and a row's result must not depend on the others in the step.
    """

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    zero, one, last = integers("0", 0), integers("1", 1), integers("-1", -1)
    count = integers(f"top_{routing.top_k}", routing.top_k)
    weights, chosen = choose(graph, logits, num_experts, routing, correction, scales)
    each = graph.node("Reshape", chosen, last)
    """[rows · top_k]: the expert of each use of one."""
    is_own = None
    if len(held) < num_experts:
        each, is_own = _own(graph, each, held)
    numbers = integers(f"all_{len(held)}", *range(len(held)))
    hits = graph.node("Equal", graph.node("Unsqueeze", each, one), numbers)
    used = graph.node("ReduceSum", graph.node("Cast", hits, to=_INT64), zero, keepdims=0)
    num_rows = graph.node("Gather", graph.node("Shape", weights), zero)
    odd = graph.node("Mod", used, integers("2", 2))
    odd = graph.node("Min", odd, graph.node("Sub", num_rows, one))  # none where a row is alone
    axis = _axis(graph)
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
    nearest = each
    if is_own is not None:
        nearest = graph.node("Min", each, integers(f"last_{len(held)}", len(held) - 1))
    ranks = graph.node("Add", ranks, graph.node("Gather", shifts, nearest))
    if is_own is not None:
        ranks = graph.node("Where", is_own, graph.node("Add", ranks, one), zero)
    return Routed(
        sources=graph.node("Concat", graph.node("Div", order, count), zero, axis=0),
        starts=starts,
        stops=stops,
        used=used,
        ranks=ranks,
        weights=weights,
    )


def run_experts(
    graph: OnnxGraph,
    x: str,
    routed: Routed,
    *,
    hidden_size: int,
    held: range,
    is_part: bool,
    expert: Expert,
) -> str:
    """x [batch, tokens, hidden] → [results, hidden], in the order of `sources`, with the rows for
    nothing. Experts of which `used` is 0 are left out, and nothing is read of their weights.

    is_part: there are others; the first row stands for them.
    """

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    zero = integers("0", 0)
    rows = graph.node("Reshape", x, integers(f"rows_{hidden_size}", -1, hidden_size))
    is_used = graph.node("Greater", routed.used, zero)
    conditions = graph.nodes("Split", is_used, outputs=len(held), axis=0)
    nothing = _nothing(graph, 0, hidden_size)
    made = [_nothing(graph, 1, hidden_size)] if is_part else []
    for number, condition in zip(held, conditions, strict=True):
        branch, rest = graph.branch(f"expert_{number}"), graph.branch(f"no_expert_{number}")
        place = integers(f"number_{number - held.start}", number - held.start)
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
    results = graph.node("Gather", results, routed.ranks)
    return _add_up(graph, x, results, routed.weights, hidden_size=hidden_size, top_k=top_k)


def _add_up(
    graph: OnnxGraph, x: str, results: str, weights: str, *, hidden_size: int, top_k: int
) -> str:
    """results [rows · top_k, hidden], weights [rows, top_k]."""

    def integers(name: str, *values: int) -> str:
        return _integers(graph, name, *values)

    # A product of [1, top_k] and [top_k, hidden] for each row, which rounds it as if it were alone.
    sizes = integers(f"mix_{top_k}_{hidden_size}", -1, top_k, hidden_size)
    found = graph.node("Reshape", results, sizes)
    weights = graph.node("Reshape", weights, integers(f"weights_{top_k}", -1, 1, top_k))
    return graph.node(
        "Reshape", graph.node("MatMul", weights, found), _shape(graph, x, hidden_size)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepSizes:
    """Sizes of the step, as values that all layers share: they have the same rows."""

    num_rows: str
    """[1]."""
    are_several: str
    """[1]: there is more than one."""
    num_uses: str
    """[1]: of all experts."""


def _step_sizes(graph: OnnxGraph, rows: str, top_k: int) -> _StepSizes:
    """rows [rows, hidden]."""

    def make() -> tuple[str, ...]:
        shape = graph.node("Shape", rows)
        num_rows = graph.node("Gather", shape, _integers(graph, "0", 0))
        are_several = graph.node("Greater", num_rows, _integers(graph, "1", 1))
        return num_rows, are_several

    def of_uses() -> tuple[str, ...]:
        return (graph.node("Mul", num_rows, _integers(graph, f"top_{top_k}", top_k)),)

    num_rows, are_several = graph.once("experts.num_rows", make)
    (num_uses,) = graph.once(f"experts.num_uses_{top_k}", of_uses)
    return _StepSizes(num_rows=num_rows, are_several=are_several, num_uses=num_uses)


def _shape(graph: OnnxGraph, x: str, hidden_size: int) -> str:
    """Shape of the step's rows [batch, tokens, hidden], for all layers."""
    return graph.once(f"experts.shape_{hidden_size}", lambda: (graph.node("Shape", x),))[0]


def _own(graph: OnnxGraph, each: str, held: range) -> tuple[str, str]:
    """each [uses]: the expert of each use of one → the same counted from the first that is held,
    how many are held for all others; and which are of those that are."""
    count = _integers(graph, f"held_{len(held)}", len(held))
    zero = _integers(graph, "0", 0)
    each = graph.node("Sub", each, _integers(graph, f"first_{held.start}", held.start))
    is_own = graph.node(
        "And",
        graph.node("GreaterOrEqual", each, zero),
        graph.node("Less", each, count),
    )
    return graph.node("Where", is_own, each, count), is_own


def _nothing(graph: OnnxGraph, rows: int, hidden_size: int) -> str:
    name = f"experts.none_{rows}_{hidden_size}"
    return graph.constant(name, np.zeros((rows, hidden_size), np.float32))


def _axis(graph: OnnxGraph) -> str:
    return graph.constant("experts.axis", np.asarray(0, np.int64))


def _integers(graph: OnnxGraph, name: str, *values: int) -> str:
    return graph.constant(f"experts.{name}", np.asarray(values, np.int64))


def _number(graph: OnnxGraph, value: float) -> str:
    return graph.constant(f"experts.number_{value}", np.asarray(value, np.float32))


def count_uses(graph: OnnxGraph, chosen: str, *, num_experts: int) -> str:
    """chosen [rows, top_k] → float32 [experts]: how many rows go through each."""
    each = graph.node("Reshape", chosen, _integers(graph, "-1_1", -1, 1))
    hits = graph.node("Equal", each, _integers(graph, f"all_{num_experts}", *range(num_experts)))
    hits = graph.node("Cast", hits, to=_FLOAT)
    return graph.node("ReduceSum", hits, _integers(graph, "0", 0), keepdims=0)


def choose(
    graph: OnnxGraph,
    logits: str,
    num_experts: int,
    routing: Routing,
    correction: str | None,
    scales: str | None,
) -> tuple[str, str]:
    """logits [batch, tokens, experts] → weights and chosen experts, both [rows, top_k]."""
    table = graph.node("Reshape", logits, _integers(graph, f"rows_{num_experts}", -1, num_experts))
    weights, chosen = _route(graph, table, num_experts, routing, correction)
    if routing.scale != 1.0:
        weights = graph.node("Mul", weights, _number(graph, routing.scale))
    if scales is not None:
        weights = graph.node("Mul", weights, graph.node("Gather", scales, chosen))
    return weights, chosen


def _route(
    graph: OnnxGraph, logits: str, num_experts: int, routing: Routing, correction: str | None
) -> tuple[str, str]:
    """logits [rows, experts] → weights, not scaled, and chosen experts, both [rows, top_k]."""

    def integers(*values: int) -> str:
        name = "_".join(map(str, values))
        return graph.constant(f"experts.route_{name}", np.asarray(values, np.int64))

    last, count = integers(-1), integers(routing.top_k)
    is_plain = correction is None and routing.groups == 1 and not routing.least_sum
    if routing.scoring == "softmax" and routing.renormalized and is_plain:
        # What a softmax of all, divided by the sum of the chosen, gives is a softmax of these.
        best, chosen = graph.nodes("TopK", logits, count, outputs=2, axis=-1)
        return graph.node("Softmax", best, axis=-1), chosen
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
        grouped = graph.node("Where", is_chosen, grouped, _number(graph, -np.inf))
        ranked = graph.node("Reshape", grouped, integers(-1, num_experts))
    weights, chosen = graph.nodes("TopK", ranked, count, outputs=2, axis=-1)
    if ranked != scores:
        weights = graph.node("GatherElements", scores, chosen, axis=-1)
    if routing.renormalized:
        total = graph.node("ReduceSum", weights, last, keepdims=1)
        if routing.least_sum:
            total = graph.node("Add", total, _number(graph, routing.least_sum))
        weights = graph.node("Div", weights, total)
    return weights, chosen


_FLOAT, _INT64, _BOOL = 1, 7, 9
"""Data types of TensorProto."""
