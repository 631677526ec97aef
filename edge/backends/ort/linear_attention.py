"""The nodes of a linear attention layer, and its states as inputs and outputs."""

from __future__ import annotations

import numpy as np

from edge.backends.ort.segments import SegmentBuilder
from edge.kernels.linear_attention.onnx import LinearWeights, linear_attention
from edge.models.linear_attention import LinearAttention


def lower_linear_attention(build: SegmentBuilder, layer: int, part: LinearAttention) -> str:
    """What is to be added to the hidden state."""
    p = f"layers.{layer}."
    normed = build.norm(f"{p}attention_norm")
    shapes: list[list[int | str]] = [["batch", *shape] for shape in part.state_shapes]
    channels, state = (
        build.input(f"past_{name}_{layer}", np.float32, shape)
        for name, shape in zip(part.state_names, shapes, strict=True)
    )
    output, *present = linear_attention(
        build.graph,
        build.linear(normed, f"{p}linear"),
        build.linear(normed, f"{p}linear_gates"),
        (channels, state),
        LinearWeights(
            convolution=_vector(build, f"{p}linear_convolution"),
            decay_bias=_vector(build, f"{p}linear_decay_bias"),
            decay_rate=_vector(build, f"{p}linear_decay_rate"),
            scale=_vector(build, f"{p}linear_scale"),
        ),
        key_heads=part.num_key_heads,
        value_heads=part.num_value_heads,
        key_size=part.key_size,
        value_size=part.value_size,
        convolution=part.convolution,
        epsilon=build.spec.norm_epsilon,
    )
    for value, name, shape in zip(present, part.state_names, shapes, strict=True):
        build.output(value, f"present_{name}_{layer}", np.float32, shape)
    return build.linear(output, f"{p}linear_output")


def _vector(build: SegmentBuilder, name: str) -> str:
    found = build.vector(name)
    assert found is not None, "every shard with units of the layer has it"
    return found
