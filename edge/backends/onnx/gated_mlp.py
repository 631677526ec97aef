"""The nodes of a gated feed-forward block."""

from __future__ import annotations

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.kernels.gated_mlp.onnx import gated
from edge.models.gated_mlp import GatedMlp


def lower_gated_mlp(
    build: SegmentBuilder, stream: ResidualStream, layer: int, part: GatedMlp
) -> str:
    """Add the nodes of the block. Returns the addend of the hidden state."""
    p = f"layers.{layer}."
    gate_up = build.linear(stream.norm(f"{p}mlp_norm"), f"{p}gate_up")
    active = gated(build.graph, gate_up, activation=part.activation)
    return build.linear(active, f"{p}down")
