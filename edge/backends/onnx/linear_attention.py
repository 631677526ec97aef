"""The nodes of a linear attention layer, and its states as inputs and outputs."""

from __future__ import annotations

import numpy as np

from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import Entry, SegmentBuilder
from edge.kernels.linear_attention.onnx import linear_attention
from edge.kernels.linear_attention.reference import WEIGHTS
from edge.models.linear_attention import LinearAttention


def lower_linear_attention(
    build: SegmentBuilder, stream: ResidualStream, layer: int, part: LinearAttention
) -> str:
    """Add the nodes of the layer. Returns the addend of the hidden state."""
    p = f"layers.{layer}."
    normed = stream.norm(f"{p}attention_norm")
    mixed, gates = build.linear(normed, f"{p}linear"), build.linear(normed, f"{p}linear_gates")

    def of_entry(entry: Entry, mixed: str, gates: str) -> str:
        """Linear attention of a step, or of one of its requests."""
        shapes: list[list[int | str]] = [[entry.size, *shape] for shape in part.state_shapes]
        channels, state = (
            build.input(entry.named(f"past_{name}_{layer}"), np.float32, shape)
            for name, shape in zip(part.state_names, shapes, strict=True)
        )
        output, *present = linear_attention(
            build.graph,
            mixed,
            gates,
            channels,
            state,
            *(build.own_vector(f"{p}linear_{name}") for name in WEIGHTS),
            key_heads=part.num_key_heads,
            value_heads=part.num_value_heads,
            key_size=part.key_size,
            value_size=part.value_size,
            width=part.convolution,
            epsilon=build.spec.norm_epsilon,
        )
        for value, name, shape in zip(present, part.state_names, shapes, strict=True):
            build.output(value, entry.named(f"present_{name}_{layer}"), np.float32, shape)
        return output

    output = build.by_entry(of_entry, mixed, gates)
    return build.linear(output, f"{p}linear_output")
