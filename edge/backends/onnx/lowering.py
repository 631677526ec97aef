"""Lowers a shard to ONNX graphs, cut only where a sum over shards must happen.

Pure: a layout and the tensors' places in, serialized graphs out. A stage that is not split is one
graph; a split one has two graphs a layer, because each sum needs the result of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from edge.backends.onnx.after_product import AfterProduct, after_part
from edge.backends.onnx.attention import lower_attention
from edge.backends.onnx.experts import lower_experts
from edge.backends.onnx.gated_mlp import lower_gated_mlp
from edge.backends.onnx.linear_attention import lower_linear_attention
from edge.backends.onnx.open_segment import LayerNames
from edge.backends.onnx.plain_mlp import lower_plain_mlp
from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.backends.onnx.segments import GraphSegment, StoredStack
from edge.backends.onnx.short_convolution import lower_short_convolution
from edge.backends.onnx.token_inputs import lower_token_inputs
from edge.kernels.logits.onnx import finish_logits
from edge.kernels.onnx_graph import CPU, Provider, Weight
from edge.models.experts import POST_NORMS
from edge.models.parts import Part
from edge.models.spec import ModelSpec
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout

_PARTS: Mapping[str, Callable[[SegmentBuilder, ResidualStream, int, Any], str]] = {
    "attention": lower_attention,
    "experts": lower_experts,
    "gated_mlp": lower_gated_mlp,
    "linear_attention": lower_linear_attention,
    "plain_mlp": lower_plain_mlp,
    "short_convolution": lower_short_convolution,
}
"""Functions that add the nodes of each kind of part, and return the addend of the hidden state."""


def lower(
    spec: ModelSpec,
    layout: ShardLayout,
    tensor: Callable[[str], Weight],
    weight_format: WeightFormat,
    kv_bits: int | None = None,
    *,
    stacks: Mapping[int, StoredStack] = MappingProxyType({}),
    joins_experts: bool = False,
    cut_layers: bool = False,
    is_loose: bool = False,
    cuts_experts: bool = False,
    observes: bool = False,
    provider: Provider = CPU,
    requests: int | None = None,
) -> tuple[GraphSegment, ...]:
    """Graphs of the shard in execution order. The first stage's `hidden` is the embedding's rows.

    tensor: gives a named tensor or its place. kv_bits: of a code in the KV cache; None for float32.
    stacks: stacked weights of layers whose experts one node computes; none with is_loose.
    joins_experts: products take all experts of a layer that are in blocks of files.
    cut_layers: at most one layer for each graph, so that its KV cache is needed only while that
    graph runs. is_loose: each layer has graphs without weights, so that it may be streamed.
    cuts_experts: each expert of such a layer has its own graph, so that only chosen experts are
    read. observes: sums over inputs of products are inputs and outputs, too (`gram_names`).
    provider: of the graphs' sessions. requests: graphs for steps of this number of requests, each
    with keys, values and states of its own (`Entry`); None: for any number of neighbours in a pool.
    """
    build = SegmentBuilder(
        spec,
        layout,
        tensor,
        weight_format,
        kv_bits,
        stacks=stacks,
        joins_experts=joins_experts,
        cut_layers=cut_layers,
        cuts_experts=cuts_experts,
        observes=observes,
        provider=provider,
        requests=requests,
    )
    stream = ResidualStream(build)
    if spec.joins_states:
        stream.begin_further_head()
    elif layout.is_first_stage:
        stream.begin_model()
    else:
        stream.begin_stage()
    for layer in layout.layers:
        if is_loose:
            _streamed(build, stream, layer)
        else:
            _layer(build, stream, layer)
            if cut_layers and not layout.is_split:
                stream.carry_over()
    if not layout.is_last_stage:
        if stream.is_under_way:
            stream.hand_over()
    elif layout.vocab:
        _head(build, stream)
    return tuple(build.segments)


def _layer(build: SegmentBuilder, stream: ResidualStream, layer: int) -> None:
    _mixer(build, stream, layer)
    lower_feed_forward(build, stream, layer)
    _token_inputs(build, stream, layer)
    if layer < build.spec.picture_layers:
        stream.add_picture_rows(layer)


def _mixer(build: SegmentBuilder, stream: ResidualStream, layer: int) -> None:
    part = build.layout.layer(layer).mixer
    if part is None and layer in build.spec.lenders:
        stream.keep(layer)
    norm = f"layers.{layer}.attention_post_norm"
    _part(build, stream, layer, part, after_part(build, norm))


def lower_feed_forward(build: SegmentBuilder, stream: ResidualStream, layer: int) -> None:
    """Add the feed-forward block of a layer, and what follows its product."""
    prefix = f"layers.{layer}."
    after = after_part(
        build,
        f"{prefix}mlp_post_norm",
        scale="" if build.spec.token_inputs else f"{prefix}layer_scale",
        apart=[f"{prefix}{name}" for name in POST_NORMS],
    )
    _part(build, stream, layer, build.layout.layer(layer).feed_forward, after)


def _token_inputs(build: SegmentBuilder, stream: ResidualStream, layer: int) -> None:
    """Add the token inputs after the feed-forward block, on every shard."""
    if build.spec.token_inputs:
        prefix = f"layers.{layer}."
        after = after_part(build, f"{prefix}token_post_norm", scale=f"{prefix}layer_scale")
        stream.contribute_whole(lower_token_inputs(build, stream, layer), after)


def _part(
    build: SegmentBuilder,
    stream: ResidualStream,
    layer: int,
    part: Part | None,
    after: AfterProduct,
) -> None:
    if part is None:
        stream.contribute_nothing(after)
    else:
        stream.contribute(_PARTS[part.kind](build, stream, layer, part), after)


def _streamed(build: SegmentBuilder, stream: ResidualStream, layer: int) -> None:
    """Add a layer in graphs that hold no other layer."""
    layout = build.layout
    if not layout.is_split and build.graph.num_nodes and not stream.adds_zeros:
        stream.carry_over()
    build.segment.names = LayerNames(streamed=layer)
    kind = f"of kind {layout.kind(layer)} with {build.kinds_of_layer(layer)}"
    build.kind = f"{'mixer' if layout.is_split else 'layer'} {kind}, adds {stream.adds}"
    if not layout.is_split and layer < build.spec.picture_layers:
        build.kind += ", adds rows of pictures"
    if layer in build.spec.lenders:
        build.kind += f", kept for those after {layer}"
    _mixer(build, stream, layer)
    if layout.is_split:
        build.kind = f"feed-forward {kind}"
    lower_feed_forward(build, stream, layer)
    if layout.is_split:
        build.kind = f"token inputs {kind}"
    _token_inputs(build, stream, layer)
    has_pictures = layer < build.spec.picture_layers
    if has_pictures:
        if layout.is_split:
            build.kind = f"rows of pictures {kind}"
        stream.add_picture_rows(layer)
    if not layout.is_split or build.spec.token_inputs or has_pictures:
        stream.carry_over()
    build.segment.names = LayerNames()


def _head(build: SegmentBuilder, stream: ResidualStream) -> None:
    """Add the last norm of the requested rows, and their logits."""
    graph = build.graph
    rows = graph.input("rows", np.int64, ["rows"])
    head_rows = graph.input("head_rows", np.int64, ["head_rows"])
    if build.observed.runs:  # observe the head's input of every token
        normed = stream.norm("final_norm")
        build.observed.observe(build.segment, normed, "head")
        normed = graph.node("Gather", normed, rows, axis=1)
    else:
        stream.take_rows(rows)
        normed = stream.norm("final_norm")
    # Requests for hidden states have many rows, for which the head's product would cost most.
    build.output(normed, "states", np.float32, ["batch", "rows", build.spec.hidden_size])
    normed = graph.node("Gather", normed, head_rows, axis=1)
    logits = finish_logits(
        graph,
        build.linear_unobserved(normed, "head"),
        scale=build.spec.logit_scale,
        soft_cap=build.spec.logit_soft_cap,
    )
    build.output(logits, "logits", np.float32, ["batch", "head_rows", len(build.layout.vocab)])
    build.cut(None)
