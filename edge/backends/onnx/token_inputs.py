"""Nodes after a feed-forward block, in layers with inputs of each token."""

from __future__ import annotations

import numpy as np

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.kernels.activation.onnx import activated
from edge.kernels.token_inputs.onnx import token_inputs
from edge.models.gated_mlp import GatedMlp


def lower_token_inputs(build: SegmentBuilder, stream: ResidualStream, layer: int) -> str:
    """Add the nodes. Returns the addend of the hidden state: its value, gated by the inputs."""
    p, graph, spec = f"layers.{layer}.", build.graph, build.spec
    part = spec.layer(layer).feed_forward
    assert isinstance(part, GatedMlp)
    gate = build.linear(stream.whole_hidden(), f"{p}token_gate")
    rows = build.input(f"token_rows_{layer}", np.float32, ["batch", "tokens", spec.token_inputs])
    inputs = token_inputs(
        graph,
        build.linear(build.hidden_input("embedded"), f"{p}token_projection"),
        rows,
        build.own_vector(f"{p}token_norm"),
        size=spec.token_inputs,
        hidden_size=spec.hidden_size,
        epsilon=spec.norm_epsilon,
    )
    active = activated(graph, gate, activation=part.activation)
    return build.linear(graph.node("Mul", active, inputs), f"{p}token_output")
