"""Linear attention as ONNX Runtime computes it: its own operators, over states that stay in place.

The present states are meant to be bound onto the past ones: its kernels read what is past before
they write, which the contract tests hold them to.
"""

from __future__ import annotations

import numpy as np

from edge.kernels.linear_attention.reference import LENGTH_EPSILON
from edge.kernels.onnx_graph import CONTRIB, OnnxGraph
from edge.kernels.rms_norm.onnx import rms_norm


def linear_attention(
    graph: OnnxGraph,
    mixed: str,
    gates: str,
    past_channels: str,
    past_states: str,
    convolution: str,
    decay_bias: str,
    decay_rate: str,
    scale: str,
    *,
    key_heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
    width: int,
    epsilon: float,
) -> tuple[str, str, str]:
    """The arguments of the formula, each but weights [batch, …]; the convolution [c · width].

    Returns (output [batch, tokens, value_heads · value_size], both present).
    """
    keys, values = key_heads * key_size, value_heads * value_size

    def integers(name: str, *numbers: int) -> str:
        return graph.constant(f"linear.{name}", np.asarray(numbers, np.int64))

    channels, gate = graph.nodes(
        "Split",
        mixed,
        integers(f"split_{2 * keys}_{values}", 2 * keys + values, values),
        outputs=2,
        axis=-1,
    )
    taps = graph.node(
        "Reshape",
        convolution,
        integers(f"taps_{keys}_{values}", 2 * keys + values, 1, width),
    )
    seen, present_channels = graph.nodes(
        "CausalConvWithState",
        channels, taps, "", past_channels,
        outputs=2, domain=CONTRIB, channels_last=1, activation="silu",
    )  # fmt: skip
    query, key, value = graph.nodes(
        "Split", seen, integers(f"apart_{keys}_{values}", keys, keys, values), outputs=3, axis=-1
    )
    # x / sqrt(Σ x² + e) is an RMSNorm of the size n of a head: weights 1/√n, epsilon e/n.
    ones = np.full(key_size, key_size**-0.5, np.float32)
    unit = graph.constant(f"linear.unit_{key_size}", ones)
    query, key = (
        graph.node(
            "Reshape",
            rms_norm(
                graph,
                graph.node(
                    "Reshape", each, integers(f"heads_{keys}_{key_size}", 0, 0, key_heads, key_size)
                ),
                unit,
                epsilon=LENGTH_EPSILON / key_size,
            ),
            integers(f"joined_{keys}", 0, 0, keys),
        )
        for each in (query, key)
    )
    decay, beta = graph.nodes(
        "Split", gates, integers(f"gates_{value_heads}", value_heads, value_heads),
        outputs=2, axis=-1,
    )  # fmt: skip
    decay, beta = graph.nodes(
        "LinearAttentionGate",
        decay, decay_bias, graph.node("Neg", graph.node("Exp", decay_rate)), beta,
        outputs=2, domain=CONTRIB,
    )  # fmt: skip
    heads, present_states = graph.nodes(
        "LinearAttention",
        query, key, value, past_states, decay, beta,
        outputs=2, domain=CONTRIB, update_rule="gated_delta",
        q_num_heads=key_heads, kv_num_heads=value_heads, scale=key_size**-0.5,
    )  # fmt: skip
    output = graph.node(
        "GatedRMSNorm", heads, scale, gate,
        domain=CONTRIB, activation="silu", epsilon=epsilon,
    )  # fmt: skip
    return output, present_channels, present_states
