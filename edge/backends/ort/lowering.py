"""Lowers a shard to ONNX graphs, cut only where a sum over shards must happen.

Pure: a layout and the tensors' places in, serialized graphs out. A stage that is not split is one
graph; a split one has two graphs a layer, because each sum needs the result of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edge.models.spec import ModelSpec
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout
from kernels.attention.onnx import (
    ROTARY_MULTIPLE,
    AttentionNames,
    CacheNames,
    attention,
)
from kernels.embedding.onnx import embedding
from kernels.gated_mlp.onnx import gated_silu
from kernels.kv_cache.cache_size import cache_head_size, cache_row
from kernels.matmul.onnx import matmul
from kernels.matmul_nbits.onnx import matmul_nbits
from kernels.onnx_graph import ExternalTensor, OnnxGraph
from kernels.rms_norm.onnx import add_rms_norm, rms_norm

Reduced = Literal["hidden", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSegment:
    """One graph and what happens after it.

    Inputs and outputs are among `tokens`, `rows`, `hidden`, `partial`, `positions`, `cos`, `sin`,
    `lengths`, `total`, `past_key_N`, `past_value_N`, `key_scales_N`, `value_scales_N` and
    `hidden_out`, `partial_out`, `logits`, `present_key_N`, `present_value_N`.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduce: Reduced | None
    """Which output is summed over the stage's shards before the next segment."""
    partial_is_zero: bool
    """This shard contributes nothing to the sum (it holds no heads, or no ffn columns)."""
    cache_layer: int | None = None
    """Whose keys and values it takes, where no graph takes those of several layers."""
    streamed: Streamed | None = None
    """Set where the matrices are brought in from disk, for good or for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What a segment of a streamed layer has beside its graph.

    Its names are without the layer's number (`past_key`, `qkv.codes`), and what is no matrix is an
    input: segments of equal `kind` differ in the places of their weights only.
    """

    layer: int
    kind: str
    vectors: tuple[tuple[str, str], ...]
    """(input, tensor of the shard's file)."""


def lower(
    spec: ModelSpec,
    layout: ShardLayout,
    tensor: Callable[[str], ExternalTensor],
    weight_format: WeightFormat,
    kv_bits: int | None = None,
    *,
    cut_layers: bool = False,
    is_loose: bool = False,
) -> tuple[GraphSegment, ...]:
    """Graphs of the shard in execution order; `tensor` tells where a named tensor lies.

    `kv_bits`: of a code in the KV cache; None for float32. `cut_layers`: no graph has more than one
    layer, so that the KV cache of a layer is needed only while its graph runs. `is_loose`: every
    layer in graphs of its own without weights, so that those may be brought in from disk; the first
    stage then takes the tokens' rows of the embedding as `hidden`.
    """
    return _Lowering(
        spec, layout, tensor, weight_format, kv_bits, cut_layers=cut_layers, is_loose=is_loose
    ).run()


class _Lowering:
    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        tensor: Callable[[str], ExternalTensor],
        weight_format: WeightFormat,
        kv_bits: int | None,
        *,
        cut_layers: bool,
        is_loose: bool,
    ) -> None:
        self.spec = spec
        self.cut_layers = cut_layers
        self.is_loose = is_loose
        self.kv_bits = kv_bits
        self.layout = layout
        self.tensor = tensor
        self.format = weight_format
        self.vectors = {vector.name for vector in layout.vectors}
        self.segments: list[GraphSegment] = []
        self.outputs: list[str] = []
        self.graph = OnnxGraph("segment_0")
        self.hidden: str = ""
        self.addend: str | None = None
        """A product not yet added to the hidden state; the next norm adds it on its way."""
        self.streamed_layer: int | None = None
        self.kind = ""
        self.vector_inputs: dict[str, str] = {}
        self.cache_layer: int | None = None

    def run(self) -> tuple[GraphSegment, ...]:
        if self.layout.is_first_stage:
            self._embed()
        else:
            self.hidden = self._hidden_input("hidden")
        for layer in self.layout.layers:
            if self.is_loose:
                self._streamed(layer)
            else:
                self._attention(layer)
                self._mlp(layer)
                if self.cut_layers and not self.layout.is_split:
                    self._carry_over()
        if not self.layout.is_last_stage:
            if self.graph.num_nodes or self.addend is not None:
                self._hand_over()
        elif self.layout.vocab:
            self._head()
            self._cut(None)
        return tuple(self.segments)

    def _streamed(self, layer: int) -> None:
        """A layer in graphs of its own; a split stage cuts there anyway."""
        if not self.layout.is_split and self.graph.num_nodes:
            self._carry_over()
        self.streamed_layer = layer
        kind = f"window {self.spec.windows[layer]}, adds {self.addend is not None}"
        self.kind = f"attention, {kind}"
        self._attention(layer)
        self.kind = "feed-forward"
        self._mlp(layer)
        if not self.layout.is_split:
            self.kind = f"layer, {kind}"
            self._carry_over()
        self.streamed_layer = None

    def _carry_over(self) -> None:
        """Cut inside a stage that is not split. The next graph adds, as it would have without."""
        carried = self.addend
        self._output(self.hidden, "hidden_out", "tokens")
        if carried is not None:
            self._output(carried, "partial_out", "tokens")
        self._cut(None)
        if carried is not None:
            self.addend = self._hidden_input("partial")

    def _hand_over(self) -> None:
        """End the graph with the whole hidden state."""
        self._add_addend()
        self._output(self.hidden, "hidden_out", "tokens")
        self._cut(None)

    def _embed(self) -> None:
        if self.is_loose:
            self._take_embedded()
            return
        rows = self.layout.embedding
        tokens = self.graph.input("tokens", np.int64, ["batch", "tokens"])
        if not rows:
            count = self.graph.constant("hidden_size", np.asarray([self.spec.hidden_size]))
            shape = self.graph.node("Concat", self.graph.node("Shape", tokens), count, axis=0)
            self.hidden = self.graph.node("ConstantOfShape", shape)
        else:
            table = self.graph.weight("embedding", self.tensor("embedding"))
            self.hidden = embedding(
                self.graph,
                tokens,
                table,
                first_id=rows.start,
                num_ids=len(rows),
                whole=not self.layout.is_split,
            )
        if self.layout.is_split:
            self._output(self.hidden, "hidden_out", "tokens")
            self._cut("hidden")

    def _take_embedded(self) -> None:
        """The embedding is on disk, too: its rows, or this shard's part of them, are given."""
        self.hidden = self._hidden_input("hidden")
        if self.layout.is_split:
            self.hidden = self.graph.node("Identity", self.hidden)
            self._output(self.hidden, "hidden_out", "tokens")
            self._cut("hidden")

    def _attention(self, layer: int) -> None:
        p = f"layers.{layer}."
        if not self.layout.num_heads:
            self._contribute_nothing()
            return
        normed = self._norm(f"{p}attention_norm")
        qkv = self._linear(normed, f"{p}qkv")
        graph, spec, layout = self.graph, self.spec, self.layout
        names = AttentionNames(
            cos=graph.input("cos", np.float32, ["context", spec.head_size // 2]),
            sin=graph.input("sin", np.float32, ["context", spec.head_size // 2]),
            positions=""
            if spec.head_size % ROTARY_MULTIPLE == 0
            else graph.input("positions", np.int64, ["batch", "tokens"]),
            lengths=graph.input("lengths", np.int32, ["batch"]),
            total=graph.input("total", np.int32, []),
        )
        output, *present = attention(
            graph,
            qkv,
            self._cache(layer),
            names,
            num_heads=layout.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_size=spec.head_size,
            window=spec.windows[layer],
            query_norm=self._vector(f"{p}query_norm"),
            key_norm=self._vector(f"{p}key_norm"),
            epsilon=spec.norm_epsilon,
        )
        self.cache_layer = layer
        dtype, shape = self._cache_rows()
        for value, name in zip(present, ("key", "value"), strict=True):
            present_name = self._local(f"present_{name}_{layer}")
            graph.output(value, present_name, dtype, shape)
            self.outputs.append(present_name)
        self._contribute(self._linear(output, f"{p}output"))

    def _cache(self, layer: int) -> CacheNames:
        """The inputs that hold the layer's KV cache."""
        graph, bits = self.graph, self.kv_bits
        dtype, shape = self._cache_rows()
        keys = graph.input(self._local(f"past_key_{layer}"), dtype, shape)
        values = graph.input(self._local(f"past_value_{layer}"), dtype, shape)
        if bits is None:
            return CacheNames(keys=keys, values=values)
        scales = [1, self.layout.num_kv_heads, 1, cache_head_size(self.spec.head_size, bits)]
        return CacheNames(
            keys=keys,
            values=values,
            bits=bits,
            key_scales=graph.input(self._local(f"key_scales_{layer}"), np.float32, scales),
            value_scales=graph.input(self._local(f"value_scales_{layer}"), np.float32, scales),
        )

    def _cache_rows(self) -> tuple[type[np.generic], list[int | str]]:
        """(dtype, shape) of the keys, or the values, of one layer."""
        dtype, elements = cache_row(self.spec.head_size, self.kv_bits)
        return dtype, ["batch", self.layout.num_kv_heads, "context", elements]

    def _mlp(self, layer: int) -> None:
        p = f"layers.{layer}."
        if not self.layout.ffn_columns:
            self._contribute_nothing()
            return
        gate_up = self._linear(self._norm(f"{p}mlp_norm"), f"{p}gate_up")
        self._contribute(self._linear(gated_silu(self.graph, gate_up), f"{p}down"))

    def _head(self) -> None:
        rows = self.graph.input("rows", np.int64, ["rows"])
        self.hidden = self.graph.node("Gather", self.hidden, rows, axis=1)
        if self.addend is not None:
            self.addend = self.graph.node("Gather", self.addend, rows, axis=1)
        logits = self._linear(self._norm("final_norm"), "head")
        self.graph.output(logits, "logits", np.float32, ["batch", "rows", len(self.layout.vocab)])
        self.outputs.append("logits")

    def _norm(self, weight: str) -> str:
        name = self._vector(weight)
        assert name is not None
        epsilon = self.spec.norm_epsilon
        if self.addend is None:
            return rms_norm(self.graph, self.hidden, name, epsilon=epsilon)
        normed, self.hidden = add_rms_norm(
            self.graph, self.hidden, self.addend, name, epsilon=epsilon
        )
        self.addend = None
        return normed

    def _linear(self, x: str, name: str) -> str:
        part = self.layout.matrix(name)
        bias = self._vector(f"{name}.bias")
        if self.format.bits is None:
            return matmul(self.graph, x, self._weight(f"{name}.weight"), bias)
        padding = part.columns.start % self.format.block_size
        if padding:
            # The slice starts inside a block: zeros stand in for the columns of the neighbour.
            pads = self.graph.constant(f"pad_{padding}", np.asarray([0, 0, padding, 0, 0, 0]))
            x = self.graph.node("Pad", x, pads)
        return matmul_nbits(
            self.graph,
            x,
            self._weight(f"{name}.codes"),
            self._weight(f"{name}.scales"),
            bias,
            rows=part.num_rows,
            columns=len(part.columns) + padding,
            bits=self.format.bits,
            block_size=self.format.block_size,
            accuracy=self.format.accuracy,
        )

    def _contribute(self, product: str) -> None:
        self.addend = product
        if self.layout.is_split:
            self._output(self.hidden, "hidden_out", "tokens")
            self._output(product, "partial_out", "tokens")
            self._cut("partial")

    def _contribute_nothing(self) -> None:
        self._add_addend()
        self._output(self.hidden, "hidden_out", "tokens")
        self._cut("partial", partial_is_zero=True)

    def _add_addend(self) -> None:
        if self.addend is not None:
            self.hidden = self.graph.node("Add", self.hidden, self.addend)
            self.addend = None

    def _cut(self, reduce: Reduced | None, *, partial_is_zero: bool = False) -> None:
        """Close the graph; the next one starts from what this one put out."""
        self.segments.append(
            GraphSegment(
                model=self.graph.build(),
                inputs=self.graph.input_names,
                outputs=tuple(self.outputs),
                reduce=reduce,
                partial_is_zero=partial_is_zero,
                cache_layer=self.cache_layer if self.cut_layers or self.layout.is_split else None,
                streamed=None
                if self.streamed_layer is None or partial_is_zero
                else Streamed(
                    layer=self.streamed_layer,
                    kind=self.kind,
                    vectors=tuple(self.vector_inputs.items()),
                ),
            )
        )
        self.vector_inputs = {}
        self.cache_layer = None
        self.graph = OnnxGraph(f"segment_{len(self.segments)}")
        self.outputs = []
        self.hidden = self._hidden_input("hidden")
        self.addend = self._hidden_input("partial") if reduce == "partial" else None

    def _hidden_input(self, name: str) -> str:
        return self.graph.input(name, np.float32, ["batch", "tokens", self.spec.hidden_size])

    def _output(self, value: str, name: str, rows: str) -> None:
        self.graph.output(value, name, np.float32, ["batch", rows, self.spec.hidden_size])
        self.outputs.append(name)

    def _vector(self, name: str) -> str | None:
        if name not in self.vectors:
            return None
        if self.streamed_layer is None:
            return self._weight(name)
        local = self.graph.input(self._local(name), np.float32, self.tensor(name).shape)
        self.vector_inputs[local] = name
        return local

    def _weight(self, name: str) -> str:
        return self.graph.weight(self._local(name), self.tensor(name))

    def _local(self, name: str) -> str:
        """The name inside the graph, the same for every streamed layer."""
        if self.streamed_layer is None:
            return name
        return name.removeprefix(f"layers.{self.streamed_layer}.").removesuffix(
            f"_{self.streamed_layer}"
        )
