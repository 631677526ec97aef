"""A short convolution as ONNX Runtime computes it, over a state that stays in place.

The present state is meant to be bound onto the past one: its kernel reads what is past before it
writes, which the contract tests hold it to.
"""

from __future__ import annotations

import numpy as np

from edge.kernels.onnx_graph import CONTRIB, OnnxGraph


def short_convolution(
    graph: OnnxGraph,
    mixed: str,
    past: str,
    weights: str,
    bias: str | None = None,
    *,
    channels: int,
    width: int,
) -> tuple[str, str]:
    """mixed [batch, tokens, 3 · channels]: before, after and x; past [batch, width − 1, channels];
    weights [channels · width], bias [channels] → (output [batch, tokens, channels], present)."""
    before, after, x = graph.nodes("Split", mixed, outputs=3, axis=-1)
    shape = np.asarray([channels, 1, width], np.int64)
    taps = graph.node("Reshape", weights, graph.constant(f"taps_{channels}_{width}", shape))
    seen, present = graph.nodes(
        "CausalConvWithState",
        graph.node("Mul", before, x), taps, bias or "", past,
        outputs=2, domain=CONTRIB, channels_last=1, activation="none",
    )  # fmt: skip
    return graph.node("Mul", after, seen), present
