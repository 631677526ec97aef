"""The nodes of a short convolution, and its state as input and output."""

from __future__ import annotations

import numpy as np

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.kernels.short_convolution.onnx import short_convolution
from edge.models.short_convolution import ShortConvolution


def lower_short_convolution(
    build: SegmentBuilder, stream: ResidualStream, layer: int, part: ShortConvolution
) -> str:
    """Add the nodes of the layer. Returns the addend of the hidden state."""
    p = f"layers.{layer}."
    (name,), (state,) = part.state_names, part.state_shapes
    shape: list[int | str] = ["batch", *state]
    past = build.input(f"past_{name}_{layer}", np.float32, shape)
    weights = build.own_vector(f"{p}short_convolution")
    output, present = short_convolution(
        build.graph,
        build.linear(stream.norm(f"{p}attention_norm"), f"{p}short"),
        past,
        weights,
        build.vector(f"{p}short_convolution_bias"),
        channels=part.channels,
        width=part.convolution,
    )
    build.output(present, f"present_{name}_{layer}", np.float32, shape)
    return build.linear(output, f"{p}short_output")
