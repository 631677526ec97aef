"""The nodes of a feed-forward block without a gate."""

from __future__ import annotations

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.kernels.activation.onnx import activated
from edge.models.plain_mlp import PlainMlp


def lower_plain_mlp(
    build: SegmentBuilder, stream: ResidualStream, layer: int, part: PlainMlp
) -> str:
    """Add the nodes of the block. Returns the addend of the hidden state."""
    p = f"layers.{layer}."
    up = build.linear(stream.norm(f"{p}mlp_norm"), f"{p}up")
    return build.linear(activated(build.graph, up, activation=part.activation), f"{p}down")
