"""The nodes of a short convolution, and its state as input and output."""

from __future__ import annotations

import numpy as np

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import Entry, SegmentBuilder
from edge.kernels.short_convolution.onnx import short_convolution
from edge.models.short_convolution import ShortConvolution


def lower_short_convolution(
    build: SegmentBuilder, stream: ResidualStream, layer: int, part: ShortConvolution
) -> str:
    """Add the nodes of the layer. Returns the addend of the hidden state."""
    p = f"layers.{layer}."
    (name,), (state,) = part.state_names, part.state_shapes

    def of_entry(entry: Entry, mixed: str) -> str:
        """The convolution of a step, or of one of its requests."""
        shape: list[int | str] = [entry.size, *state]
        output, present = short_convolution(
            build.graph,
            mixed,
            build.input(entry.named(f"past_{name}_{layer}"), np.float32, shape),
            build.own_vector(f"{p}short_convolution"),
            build.vector(f"{p}short_convolution_bias"),
            channels=part.channels,
            width=part.convolution,
        )
        build.output(present, entry.named(f"present_{name}_{layer}"), np.float32, shape)
        return output

    mixed = build.linear(stream.norm(f"{p}attention_norm"), f"{p}short")
    output = build.by_entry(of_entry, mixed)
    return build.linear(output, f"{p}short_output")
