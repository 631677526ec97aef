"""The nodes of a router and its experts, and of a shared one."""

from __future__ import annotations

import numpy as np

from edge.backends.ort.segments import SegmentBuilder
from edge.kernels.experts.onnx import experts
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
    biases = [_of_experts(build, part, f"{prefix}experts_{name}_bias") for name in _BIASES]
    shared, weight = part.shared, ""
    if shared is not None and shared.is_gated:
        sizes = np.asarray([part.num_experts, 1], np.int64)
        split = build.graph.constant(f"router_{part.num_experts}_1", sizes)
        logits, weight = build.graph.nodes("Split", logits, split, outputs=2, axis=-1)
    routed = experts(
        build.graph,
        x,
        logits,
        hidden_size=build.spec.hidden_size,
        num_experts=part.num_experts,
        routing=part.routing,
        expert=expert,
        correction=build.vector(f"{prefix}router_correction"),
        scales=build.vector(f"{prefix}expert_scales"),
    )
    if shared is None:
        if part.is_apart:  # of which the shard has no columns
            nothing = build.graph.node("Sub", routed, routed)
            return build.graph.node("Concat", nothing, routed, axis=-1)
        return routed
    own = shared_name(prefix)
    active = gated(
        build.graph, build.linear_unobserved(of_shared, f"{own}gate_up"), activation=part.activation
    )
    given = build.linear_unobserved(active, f"{own}down")
    if weight:
        given = build.graph.node("Mul", given, build.graph.node("Sigmoid", weight))
    if part.is_apart:
        return build.graph.node("Concat", given, routed, axis=-1)
    return build.graph.node("Add", routed, given)


def _of_experts(build: SegmentBuilder, part: Experts, name: str) -> str:
    """A vector with something of each expert as [experts, size]; "" if the shard has none."""
    vector = build.vector(name)
    if vector is None:
        return ""
    shape = np.asarray([part.num_experts, -1], np.int64)
    rows = build.graph.constant(f"of_experts_{part.num_experts}", shape)
    return build.graph.node("Reshape", vector, rows)
