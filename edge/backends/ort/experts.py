"""The nodes of a router and its experts."""

from __future__ import annotations

from edge.backends.ort.segments import SegmentBuilder
from edge.kernels.experts.onnx import experts
from edge.kernels.gated_mlp.onnx import gated
from edge.kernels.onnx_graph import OnnxGraph
from edge.models.experts import Experts, expert_name


def lower_experts(build: SegmentBuilder, layer: int, part: Experts) -> str:
    """What is to be added to the hidden state."""
    prefix = f"layers.{layer}."

    def expert(branch: OnnxGraph, number: int, x: str) -> str:
        own = expert_name(prefix, number)
        with build.within(branch):
            gate_up = build.linear_unobserved(x, f"{own}gate_up")
            active = gated(branch, gate_up, activation=part.activation)
            return build.linear_unobserved(active, f"{own}down")

    x = build.norm(f"{prefix}mlp_norm")
    return experts(
        build.graph,
        x,
        build.linear_unobserved(x, f"{prefix}router"),
        hidden_size=build.spec.hidden_size,
        num_experts=part.num_experts,
        top_k=part.top_k,
        renormalized=part.renormalized,
        expert=expert,
    )
