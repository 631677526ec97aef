"""The nodes of a router and its experts, and of a shared one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.backends.onnx.segments import StoredStack, StreamedExperts
from edge.kernels.experts.onnx import (
    Routed,
    StackedWeights,
    choose,
    joined_experts,
    mix,
    order_rows,
    run_experts,
    stacked_experts,
)
from edge.kernels.gated_mlp.onnx import gated
from edge.kernels.onnx_graph import OnnxGraph
from edge.models.experts import Experts, expert_name, shared_name

_PARTS = ("gate_up", "down")
"""Names of an expert's matrices."""


def lower_experts(build: SegmentBuilder, stream: ResidualStream, layer: int, part: Experts) -> str:
    """The nodes of a layer's experts. Returns the value to add to the hidden state; with
    `is_apart`, the outputs of the shared expert and of the other experts, side by side."""
    prefix = f"layers.{layer}."

    def expert(branch: OnnxGraph, number: int, x: str) -> str:
        index = number - part.held.start
        place = branch.constant(f"expert_{index}", np.asarray(index, np.int64))
        own = {name: branch.node("Gather", each, place) for name, each in biases.items()}
        with build.segment.within(branch):
            return _expert(build, part, expert_name(prefix, number), x, own)

    # This norm comes first, because it also adds the addend.
    of_shared = stream.norm(f"{prefix}mlp_norm")
    x = logits = of_shared
    if part.is_apart:
        x, logits = (stream.norm(f"{prefix}{name}") for name in ("experts_norm", "router_norm"))
    logits = build.linear_unobserved(logits, f"{prefix}router")
    if part.is_apart:
        share = np.asarray(build.spec.hidden_size**-0.5, np.float32)
        logits = build.graph.node("Mul", logits, build.graph.constant("router_share", share))
    shared, weight = part.shared, ""
    if shared is not None and shared.is_gated:
        sizes = np.asarray([part.num_experts, 1], np.int64)
        split = build.graph.constant(f"router_{part.num_experts}_1", sizes)
        logits, weight = build.graph.nodes("Split", logits, split, outputs=2, axis=-1)
    size, count = build.spec.hidden_size, part.num_experts
    correction = build.vector(f"{prefix}router_correction")
    scales = build.vector(f"{prefix}expert_scales")
    build.observed.count_experts(
        build.segment,
        layer,
        lambda: choose(build.graph, logits, count, part.routing, correction, scales)[1],
    )
    own_names = [expert_name(prefix, number) for number in part.held]
    stack = build.stacks.get(layer)
    if all(build.are_joined([f"{own}{name}" for own in own_names]) for name in _PARTS):
        mixed = joined_experts(
            build.graph, x, logits, hidden_size=size, num_experts=count, held=part.held,
            routing=part.routing, each=partial(_joined, build, part, prefix),
            correction=correction, scales=scales,
        )  # fmt: skip
    elif stack is not None:
        mixed = stacked_experts(
            build.graph, x, logits, hidden_size=size, num_experts=count, held=part.held,
            routing=part.routing, stacked=_stacked(build, prefix, stack), correction=correction,
            scales=scales,
        )  # fmt: skip
    else:
        routed = order_rows(
            build.graph, logits, num_experts=count, held=part.held, routing=part.routing,
            correction=correction, scales=scales,
        )  # fmt: skip
        if build.cuts_experts:
            own_graphs = _streamed_experts(build, layer, part)
            x, of_shared, results, routed = _cut_at_experts(
                build,
                stream,
                part,
                own_graphs,
                x=x,
                of_shared=of_shared,
                routed=routed,
                gate=weight,
            )
            weight = weight and build.input("expert_gate", np.float32, ["batch", "tokens", 1])
        else:
            biases = {
                name: _of_experts(build, part, vector)
                for name, vector in _biases(build, prefix).items()
            }
            results = run_experts(
                build.graph, x, routed, hidden_size=size, held=part.held,
                is_part=part.is_part, expert=expert,
            )  # fmt: skip
        mixed = mix(build.graph, x, results, routed, hidden_size=size, top_k=part.top_k)
    if shared is None:
        if part.is_apart:  # the shard has no columns of the shared expert
            nothing = build.graph.node("Sub", mixed, mixed)
            return build.graph.node("Concat", nothing, mixed, axis=-1)
        return mixed
    own = shared_name(prefix)
    active = gated(
        build.graph, build.linear_unobserved(of_shared, f"{own}gate_up"), activation=part.activation
    )
    given = build.linear_unobserved(active, f"{own}down")
    if weight:
        given = build.graph.node("Mul", given, build.graph.node("Sigmoid", weight))
    if part.is_apart:
        return build.graph.node("Concat", given, mixed, axis=-1)
    return build.graph.node("Add", mixed, given)


def _joined(build: SegmentBuilder, part: Experts, prefix: str, x: str, chosen: str) -> str:
    """What the chosen expert of each use gives [1, uses, hidden]."""
    biases = _biases(build, prefix)

    def product(x: str, name: str) -> str:
        names = [f"{expert_name(prefix, number)}{name}" for number in part.held]
        result = build.chosen_products(x, chosen, names)
        if name not in biases:
            return result
        own = build.graph.node("Gather", _of_experts(build, part, biases[name]), chosen)
        return build.graph.node("Add", result, own)

    return _block(build, part, x, product)


def _stacked(build: SegmentBuilder, prefix: str, stack: StoredStack) -> StackedWeights:
    names = {
        name: build.graph.weight(f"{prefix}experts.{name}", tensor)
        for name, tensor in stack.tensors.items()
    }
    return StackedWeights(**names, bits=stack.kind.bits, block_size=stack.kind.block_size)


def _cut_at_experts(
    build: SegmentBuilder,
    stream: ResidualStream,
    part: Experts,
    experts: StreamedExperts,
    *,
    x: str,
    of_shared: str,
    routed: Routed,
    gate: str,
) -> tuple[str, str, str, Routed]:
    """End the graph, so that the chosen experts are read and computed before the next graph.

    Returns values of the next graph: the experts' inputs, the shared expert's input (perhaps the
    same), the results, and the routing. gate: weight of a shared expert; "" without one.
    """
    count, size = len(part.held), build.spec.hidden_size
    shapes: dict[str, tuple[type[np.generic], list[int | str]]] = {
        "sources": (np.int64, ["sources"]),
        **{name: (np.int64, [count]) for name in ("starts", "stops", "used")},
        "ranks": (np.int64, ["uses"]),
        "weights": (np.float32, ["routed_rows", part.top_k]),
    }
    for name, (dtype, shape) in shapes.items():
        build.output(getattr(routed, name), f"expert_{name}", dtype, shape)
    if gate:
        build.output(gate, "expert_gate", np.float32, ["batch", "tokens", 1])
    if of_shared == x:
        (x,) = stream.cut_within([x], "to its router", experts=experts)
        of_shared = x
    else:
        x, of_shared = stream.cut_within([x, of_shared], "to its router", experts=experts)
    behind = {name: build.input(f"expert_{name}", *shapes[name]) for name in ("ranks", "weights")}
    results = build.input("expert_results", np.float32, ["most_results", size])
    return x, of_shared, results, replace(routed, **behind)


def _streamed_experts(build: SegmentBuilder, layer: int, part: Experts) -> StreamedExperts:
    """A graph for each expert of a layer."""
    prefix, size = f"layers.{layer}.", build.spec.hidden_size
    biases = _biases(build, prefix)
    widths = {name: build.vector_size(each) // len(part.held) for name, each in biases.items()}
    models: list[bytes] = []
    for number in part.held:
        graph = OnnxGraph("expert", build.graph.provider)
        x = graph.input("x", np.float32, [1, "rows", size])
        given = {
            name: graph.input(f"{name}_bias", np.float32, [width]) for name, width in widths.items()
        }
        with build.segment.within(graph, prefix=expert_name("", number)):
            results = _expert(build, part, expert_name(prefix, number), x, given)
        graph.output(results, "results", np.float32, [1, "rows", size])
        models.append(graph.build())
    first = expert_name(prefix, part.held.start)
    return StreamedExperts(
        kind=f"{part} with {build.kinds_of(*(f'{first}{name}' for name in _PARTS))}",
        models=tuple(models),
        biases=tuple((f"{name}_bias", tensor) for name, tensor in biases.items()),
        top_k=part.top_k,
    )


def _expert(
    build: SegmentBuilder, part: Experts, own: str, x: str, biases: Mapping[str, str]
) -> str:
    """Output of one expert. own: prefix of its matrices' names; biases: by matrix."""

    def product(x: str, name: str) -> str:
        result = build.linear_unobserved(x, f"{own}{name}")
        return build.graph.node("Add", result, biases[name]) if name in biases else result

    return _block(build, part, x, product)


def _block(build: SegmentBuilder, part: Experts, x: str, product: Callable[[str, str], str]) -> str:
    """product(x, name): with the matrix of this name, and its bias."""
    gate_up = product(x, "gate_up")
    active = gated(build.graph, gate_up, activation=part.activation, clamp=part.clamp)
    return product(active, "down")


def _biases(build: SegmentBuilder, prefix: str) -> dict[str, str]:
    """Names of the bias vectors of all experts, by matrix."""
    vectors = {name: f"{prefix}experts_{name}_bias" for name in _PARTS}
    return {name: vector for name, vector in vectors.items() if build.has_vector(vector)}


def _of_experts(build: SegmentBuilder, part: Experts, name: str) -> str:
    """The vector with values of each expert of the shard, as [experts, size]."""
    vector = build.own_vector(name)
    shape = np.asarray([len(part.held), -1], np.int64)
    rows = build.graph.constant(f"of_experts_{len(part.held)}", shape)
    return build.graph.node("Reshape", vector, rows)
