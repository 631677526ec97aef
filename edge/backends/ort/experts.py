"""The nodes of a router and its experts, and of a shared one."""

from __future__ import annotations

import numpy as np

from edge.backends.ort.expert_stacks import ExpertStack
from edge.backends.ort.segments import SegmentBuilder
from edge.kernels.experts.onnx import (
    Routed,
    StackedWeights,
    mix,
    order_rows,
    run_experts,
    stacked_experts,
)
from edge.kernels.gated_mlp.onnx import gated
from edge.kernels.onnx_graph import OnnxGraph
from edge.models.experts import Experts, expert_name, shared_name

_BIASES = ("gate_up", "down")


def lower_experts(build: SegmentBuilder, layer: int, part: Experts) -> str:
    """What is to be added to the hidden state; where they are apart, what the shared one gives and
    what the others give side by side."""
    prefix = f"layers.{layer}."

    def expert(branch: OnnxGraph, number: int, x: str) -> str:
        own = expert_name(prefix, number)
        with build.within(branch):
            gate_up = biased(branch, build.linear_unobserved(x, f"{own}gate_up"), 0, number)
            active = gated(branch, gate_up, activation=part.activation, clamp=part.clamp)
            return biased(branch, build.linear_unobserved(active, f"{own}down"), 1, number)

    def biased(branch: OnnxGraph, x: str, which: int, number: int) -> str:
        if not biases[which]:
            return x
        place = branch.constant(f"expert_{number}", np.asarray(number, np.int64))
        return branch.node("Add", x, branch.node("Gather", biases[which], place))

    # The norm of what is added comes first: those behind it only norm.
    of_shared = build.norm(f"{prefix}mlp_norm")
    x = logits = of_shared
    if part.is_apart:
        x, logits = (build.norm(f"{prefix}{name}") for name in ("experts_norm", "router_norm"))
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
    stack = build.stacks.get(layer)
    if stack is not None:
        mixed = stacked_experts(
            build.graph, x, logits, hidden_size=size, num_experts=count, routing=part.routing,
            stacked=_stacked(build, prefix, stack), correction=correction, scales=scales,
        )  # fmt: skip
    else:
        routed = order_rows(
            build.graph, logits, num_experts=count, routing=part.routing,
            correction=correction, scales=scales,
        )  # fmt: skip
        if build.cuts_experts:
            # Who has rows is known now, and their weights are brought in.
            x, of_shared, routed = _cut_before_experts(build, part, x, of_shared, routed, weight)
        biases = [_of_experts(build, part, f"{prefix}experts_{name}_bias") for name in _BIASES]
        results = run_experts(
            build.graph, x, routed, hidden_size=size, num_experts=count, expert=expert
        )
        if build.cuts_experts:
            x, of_shared, results = _cut_behind_experts(build, part, x, of_shared, results)
            weight = weight and build.input("expert_gate", np.float32, ["batch", "tokens", 1])
        mixed = mix(build.graph, x, results, routed, hidden_size=size, top_k=part.top_k)
    if shared is None:
        if part.is_apart:  # of which the shard has no columns
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


def _stacked(build: SegmentBuilder, prefix: str, stack: ExpertStack) -> StackedWeights:
    names = {
        name: build.graph.weight(f"{prefix}experts.{name}", tensor)
        for name, tensor in stack.tensors.items()
    }
    return StackedWeights(**names, bits=stack.kind.bits, block_size=stack.kind.block_size)


def _cut_before_experts(
    build: SegmentBuilder, part: Experts, x: str, of_shared: str, routed: Routed, gate: str
) -> tuple[str, str, Routed]:
    """What the next two graphs need of the routing, as outputs of this one and inputs of those.

    gate: what a shared expert is weighted by; "" where there is no such thing.
    """
    shapes: dict[str, tuple[type[np.generic], list[int | str]]] = {
        "sources": (np.int64, ["sources"]),
        **{name: (np.int64, [part.num_experts]) for name in ("starts", "stops", "used")},
        "ranks": (np.int64, ["uses"]),
        "weights": (np.float32, ["routed_rows", part.top_k]),
    }
    for name, (dtype, shape) in shapes.items():
        build.output(getattr(routed, name), f"expert_{name}", dtype, shape)
    if gate:
        build.output(gate, "expert_gate", np.float32, ["batch", "tokens", 1])
    x, of_shared = _cut(build, x, of_shared, "to its router")
    here = ("sources", "starts", "stops", "used")
    inputs = {name: build.input(f"expert_{name}", *shapes[name]) for name in here}
    return x, of_shared, Routed(**inputs, ranks="expert_ranks", weights="expert_weights")


def _cut_behind_experts(
    build: SegmentBuilder, part: Experts, x: str, of_shared: str, results: str
) -> tuple[str, str, str]:
    size = build.spec.hidden_size
    build.output(results, "expert_results", np.float32, ["results", size])
    x, of_shared = _cut(
        build, x, of_shared, "its experts", experts=part.num_experts, top_k=part.top_k
    )
    build.input("expert_ranks", np.int64, ["uses"])
    build.input("expert_weights", np.float32, ["routed_rows", part.top_k])
    return x, of_shared, build.input("expert_results", np.float32, ["most_results", size])


def _cut(
    build: SegmentBuilder, x: str, of_shared: str, done: str, **experts: int
) -> tuple[str, str]:
    """What the experts are given, and what the shared one is given, which may be the same."""
    if of_shared == x:
        (x,) = build.cut_within([x], done, **experts)
        return x, x
    x, of_shared = build.cut_within([x, of_shared], done, **experts)
    return x, of_shared


def _of_experts(build: SegmentBuilder, part: Experts, name: str) -> str:
    """A vector with something of each expert as [experts, size]; "" if the shard has none."""
    vector = build.vector(name)
    if vector is None:
        return ""
    shape = np.asarray([part.num_experts, -1], np.int64)
    rows = build.graph.constant(f"of_experts_{part.num_experts}", shape)
    return build.graph.node("Reshape", vector, rows)
