"""The nodes of a gated feed-forward block."""

from __future__ import annotations

from edge.backends.ort.segments import SegmentBuilder
from edge.models.gated_mlp import GatedMlp
from kernels.gated_mlp.onnx import gated_silu


def lower_gated_mlp(build: SegmentBuilder, layer: int, _part: GatedMlp) -> str:
    """What is to be added to the hidden state."""
    p = f"layers.{layer}."
    gate_up = build.linear(build.norm(f"{p}mlp_norm"), f"{p}gate_up")
    return build.linear(gated_silu(build.graph, gate_up), f"{p}down")
