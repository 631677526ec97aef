"""The graph of a part of a tower: of a whole one, from the patches of a tile to rows of the model.

Patches come block by block, so that rows are neighbours' joined without a copy in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.after_product import after_part
from edge.backends.onnx.lowering import lower_feed_forward
from edge.backends.onnx.residual_stream import ResidualStream
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.backends.onnx.segments import GraphSegment
from edge.kernels.activation.onnx import activated
from edge.kernels.layer_norm.onnx import layer_norm
from edge.kernels.onnx_graph import CPU, Provider, Weight
from edge.kernels.patch_attention.onnx import patch_attention, window_attention
from edge.kernels.patches.onnx import embed, join
from edge.kernels.position_table.onnx import TAPS, position_table
from edge.kernels.position_table.reference import taps
from edge.kernels.rms_norm.onnx import rms_norm
from edge.kernels.rope.onnx import rope
from edge.models.attention import Attention
from edge.models.gated_mlp import GatedMlp
from edge.models.pictures import Tile
from edge.models.towers.part import TowerPart
from edge.models.towers.positions import block_order, turn_tables, windows
from edge.models.towers.tower import BOUNDED, BOUNDS, CHANNELS, Merger, Tower, TowerNorm
from edge.weights.formats import WeightFormat
from edge.weights.tower import tower_layout

ROWS, DEEP = "rows", "deep_{}"
"""Outputs [1, rows, output size]: the rows, and those of deep layers."""
HIDDEN, HIDDEN_OUT = "hidden", "hidden_out"
"""The hidden state [1, patches, hidden size] before and behind a part, in the order of blocks."""


def lower_tower(
    part: TowerPart,
    tensor: Callable[[str], Weight],
    weight_format: WeightFormat,
    *,
    provider: Provider = CPU,
) -> GraphSegment:
    """The graph. Its inputs are those of `tower_feeds`, with HIDDEN in place of patches unless the
    part is the first. It gives HIDDEN_OUT unless it is the last. tensor: gives a named tensor or
    its place."""
    tower = part.tower
    hidden_shape: list[int | str] = [1, "patches", tower.encoder.hidden_size]
    build = SegmentBuilder(
        tower.encoder,
        tower_layout(part),
        tensor,
        weight_format,
        None,
        stacks={},
        joins_experts=False,
        cut_layers=False,
        cuts_experts=False,
        observes=False,
        provider=provider,
        requests=None,
    )
    stream = ResidualStream(build)
    if part.is_first:
        stream.begin_tower(_patches(build, tower))
    else:
        stream.begin_tower_part(build.graph.input(HIDDEN, np.float32, hidden_shape))
    deep = {layer: number for number, (layer, _merger) in enumerate(tower.deep)}
    for layer in build.layout.layers:
        output = _attention(build, tower, stream, layer)
        stream.contribute(output, after_part(build, f"layers.{layer}.attention_post_norm"))
        if tower.bounds:
            output = _gated_mlp(build, tower, stream, layer)
            stream.contribute(output, after_part(build, f"layers.{layer}.mlp_post_norm"))
        else:
            lower_feed_forward(build, stream, layer)
        if layer in deep:
            number = deep[layer]
            _merge(build, tower, stream.whole_hidden(), number + 1, DEEP.format(number))
    if part.is_last:
        _merge(build, tower, stream.whole_hidden(), 0, ROWS)
    else:
        build.output(stream.whole_hidden(), HIDDEN_OUT, np.float32, hidden_shape)
    build.cut(None)
    return build.segments[0]


def tower_feeds(part: TowerPart, tile: Tile) -> dict[str, NDArray[np.generic]]:
    """The inputs of the graph of a first part for a tile. Raises ValueError for one that the tower
    does not read."""
    tower, size = part.tower, (tile.height, tile.width)
    tower.check(tile)
    order = block_order(tower.side, *size)
    feeds = _feeds_of_layers(part, *size) | {"pixels": tile.patches[None, order]}
    if tower.table is not None:
        places, shares = taps(tower.table, tower.table_side, *size)
        feeds |= {"places": places[:, order], "shares": shares[:, order]}
    return feeds


def part_feeds(
    part: TowerPart, hidden: NDArray[np.float32], height: int, width: int
) -> dict[str, NDArray[np.generic]]:
    """The inputs of the graph of another part, for a hidden state [patches, hidden size] of a tile
    of so many patches. Raises ValueError for one that the part does not take."""
    part.tower.row_grid(height, width)
    if hidden.shape != (height * width, part.tower.encoder.hidden_size):
        raise ValueError(f"a hidden state {hidden.shape} of {height} by {width} patches")
    return _feeds_of_layers(part, height, width) | {HIDDEN: hidden[None]}


def _feeds_of_layers(part: TowerPart, height: int, width: int) -> dict[str, NDArray[np.generic]]:
    tower, feeds = part.tower, dict[str, NDArray[np.generic]]()
    if tower.turns is not None:
        order = block_order(tower.side, height, width)
        cos, sin = turn_tables(tower.turns, height, width)
        feeds |= {"cos": cos[order], "sin": sin[order], "numbers": np.arange(len(order))[None]}
    if part.has_windows:
        assert tower.window is not None
        members, counts, back = windows(tower.side, tower.window, height, width)
        feeds |= {"members": members, "counts": counts, "back": back}
    return feeds


def _patches(build: SegmentBuilder, tower: Tower) -> str:
    """Patches with their positions, normed."""
    graph, hidden = build.graph, tower.encoder.hidden_size
    x = embed(
        graph,
        graph.input("pixels", np.uint8, [1, "patches", tower.patch_elements]),
        build.own_vector("patches"),
        graph.constant("pixel_scale", np.asarray(tower.pixel_scale, np.float32)[:, None]),
        graph.constant("pixel_shift", np.asarray(tower.pixel_shift, np.float32)[:, None]),
        outputs=hidden,
        channels=CHANNELS,
        frames=tower.frames,
        frames_apart=tower.frames_apart,
        channels_last=tower.channels_last,
    )
    if tower.patch_bias:
        x = graph.node("Add", x, build.own_vector("patch_bias"))
    if tower.table is not None:
        count = TAPS[tower.table]
        places = graph.input("places", np.int64, [count, "patches"])
        shares = graph.input("shares", np.float32, [count, "patches"])
        table = _shaped(build, build.own_vector("positions"), -1, hidden)
        x = position_table(graph, x, places, shares, table, taps=count)
    return (
        x if tower.first_norm is None else _norm(build, x, "first_norm", tower.first_norm, hidden)
    )


def _attention(build: SegmentBuilder, tower: Tower, stream: ResidualStream, layer: int) -> str:
    """The addend of the hidden state."""
    graph, p = build.graph, f"layers.{layer}."
    part = build.layout.layer(layer).mixer
    assert isinstance(part, Attention)
    heads, size = part.num_heads, part.head_size
    normed = stream.norm(f"{p}attention_norm")
    if tower.bounds:
        query, key, value = (
            _bounded(build, tower, normed, layer, each) for each in ("query", "key", "value")
        )
    else:
        packed = build.linear(normed, f"{p}qkv")
        query, key, value = graph.nodes("Split", packed, outputs=3, axis=-1)
    if part.query_key_norm:
        query = _normed_heads(build, query, part, build.own_vector(f"{p}query_norm"))
        key = _normed_heads(build, key, part, build.own_vector(f"{p}key_norm"))
    if part.value_norm:
        value = _normed_heads(build, value, part, _ones(build, size))
    if tower.turns is not None:
        query, key = (_turned(build, tower, each, part) for each in (query, key))
    scale = size**-0.5 if part.score_scale is None else part.score_scale
    if tower.window is None or layer in tower.whole_layers:
        output = patch_attention(graph, query, key, value, num_heads=heads, scale=scale)
    else:
        members = graph.input("members", np.int64, ["windows", "most"])
        counts = graph.input("counts", np.int32, ["windows"])
        places = (members, counts, graph.input("back", np.int64, ["patches"]))
        output = window_attention(
            graph, query, key, value, *places, num_heads=heads, scale=scale, width=heads * size
        )
    if tower.bounds:
        return _bounded(build, tower, output, layer, "output")
    return build.linear(output, f"{p}output")


def _gated_mlp(build: SegmentBuilder, tower: Tower, stream: ResidualStream, layer: int) -> str:
    """The addend of a feed-forward block whose products have bounds."""
    part, normed = build.layout.layer(layer).feed_forward, stream.norm(f"layers.{layer}.mlp_norm")
    assert isinstance(part, GatedMlp)
    gate, up = (_bounded(build, tower, normed, layer, each) for each in ("gate", "up"))
    active = activated(build.graph, gate, activation=part.activation)
    return _bounded(build, tower, build.graph.node("Mul", active, up), layer, "down")


def _bounded(build: SegmentBuilder, tower: Tower, x: str, layer: int, product: str) -> str:
    """A product with its inputs and outputs kept within bounds."""
    first = BOUNDED.index(product) * len(BOUNDS)
    bounds = tower.bounds[layer][first : first + len(BOUNDS)]
    name = f"layers.{layer}.{product}"
    ends = [
        build.graph.constant(f"{name}.{bound}", np.asarray(value, np.float32))
        for bound, value in zip(BOUNDS, bounds, strict=True)
    ]
    x = build.linear(build.graph.node("Clip", x, *ends[:2]), name)
    return build.graph.node("Clip", x, *ends[2:])


def _normed_heads(build: SegmentBuilder, x: str, part: Attention, weight: str) -> str:
    """x [1, patches, heads · size] with each head normed."""
    heads = _shaped(build, x, 0, 0, part.num_heads, part.head_size)
    normed = rms_norm(build.graph, heads, weight, epsilon=build.spec.norm_epsilon)
    return _shaped(build, normed, 0, 0, part.num_heads * part.head_size)


def _turned(build: SegmentBuilder, tower: Tower, x: str, part: Attention) -> str:
    """x [1, patches, heads · size] rotated. Halves that turn by one axis each are brought into the
    order of halves of pairs: queries and keys alike, so that scores are the same."""
    assert tower.turns is not None
    graph, pairs = build.graph, part.head_size // 2
    if tower.turns.is_by_axis:
        parts = _shaped(build, x, 0, 0, part.num_heads, 2, 2, pairs // 2)
        parts = graph.node("Transpose", parts, perm=[0, 1, 2, 4, 3, 5])
        x = _shaped(build, parts, 0, 0, part.num_heads * part.head_size)
    return rope(
        graph,
        x,
        graph.input("numbers", np.int64, [1, "patches"]),
        graph.input("cos", np.float32, ["patches", pairs]),
        graph.input("sin", np.float32, ["patches", pairs]),
        num_heads=part.num_heads,
        turned_elements=part.head_size,
    )


def _merge(build: SegmentBuilder, tower: Tower, x: str, number: int, name: str) -> None:
    """Add a merger, and its output of this name. number: in `Tower.mergers`."""
    graph = build.graph
    (prefix, merger), hidden = tower.mergers[number], tower.encoder.hidden_size
    if merger.patch_norm is not None:
        x = _norm(build, x, f"{prefix}patch_norm", merger.patch_norm, hidden)
    x = join(graph, x, size=hidden, block=tower.side**2, joining=merger.joining)
    if merger.scale != 1.0:
        x = graph.node(
            "Mul", x, graph.constant(f"{prefix}scale", np.asarray([merger.scale], np.float32))
        )
    if merger.standardized:
        x = graph.node("Sub", x, build.own_vector(f"{prefix}row_shift"))
        x = graph.node("Mul", x, build.own_vector(f"{prefix}row_factor"))
    if merger.row_norm is not None:
        x = _norm(build, x, f"{prefix}row_norm", merger.row_norm, _joined(tower, merger))
    inputs = _joined(tower, merger)
    for index, each in enumerate(merger.projections):
        role = f"{prefix}{index}"
        if each.is_turned:
            matrix = _shaped(build, build.own_vector(f"{role}.weight"), inputs, each.outputs)
            x = graph.node("MatMul", x, matrix)
            if each.bias:
                x = graph.node("Add", x, build.own_vector(f"{role}.bias"))
        else:
            x = build.linear(x, role)
        if each.activation is not None:
            x = activated(graph, x, activation=each.activation)
        inputs = each.outputs
    build.output(x, name, np.float32, [1, "rows", tower.output_size])


def _joined(tower: Tower, merger: Merger) -> int:
    return merger.joined_size(tower.encoder.hidden_size, tower.side)


def _norm(build: SegmentBuilder, x: str, role: str, norm: TowerNorm, size: int) -> str:
    """x [..., size], normed."""
    graph = build.graph
    if norm.kind == "plain":
        return rms_norm(graph, x, _ones(build, size), epsilon=norm.epsilon)
    weight = build.own_vector(role)
    if norm.offset:
        offset = graph.constant(f"{role}_offset", np.asarray([norm.offset], np.float32))
        weight = graph.node("Add", weight, offset)
    if norm.kind == "rms":
        return rms_norm(graph, x, weight, epsilon=norm.epsilon)
    return layer_norm(graph, x, weight, build.own_vector(f"{role}_bias"), epsilon=norm.epsilon)


def _ones(build: SegmentBuilder, size: int) -> str:
    return build.graph.constant(f"ones_{size}", np.ones(size, np.float32))


def _shaped(build: SegmentBuilder, x: str, *sizes: int) -> str:
    name = "shape_" + "_".join(map(str, sizes))
    return build.graph.node("Reshape", x, build.graph.constant(name, np.asarray(sizes)))
