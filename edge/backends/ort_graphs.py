"""Lowers a shard to ONNX graphs, cut only where a sum over shards must happen.

Pure: a layout and the tensors' places in, serialized graphs out. A stage that is not split is one
graph; a split one has two graphs a layer, because each sum needs the result of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edge.formats import WeightFormat
from edge.layout import ShardLayout
from edge.models.spec import ModelSpec
from kernels.attention.onnx import (
    ROTARY_MULTIPLE,
    AttentionNames,
    attention,
    cache_head_size,
)
from kernels.embedding.onnx import embedding
from kernels.gated_mlp.onnx import gated_silu
from kernels.matmul.onnx import matmul
from kernels.matmul_nbits.onnx import matmul_nbits
from kernels.onnx_graph import ExternalTensor, OnnxGraph
from kernels.rms_norm.onnx import add_rms_norm, rms_norm

Reduced = Literal["hidden", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSegment:
    """One graph and what happens after it.

    Inputs and outputs are among `tokens`, `rows`, `hidden`, `partial`, `positions`, `cos`, `sin`,
    `lengths`, `total`, `past_key_N`, `past_value_N` and `hidden_out`, `partial_out`, `logits`,
    `present_key_N`, `present_value_N`.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduce: Reduced | None
    """Which output is summed over the stage's shards before the next segment."""
    partial_is_zero: bool
    """This shard contributes nothing to the sum (it holds no heads, or no ffn columns)."""


def lower(
    spec: ModelSpec,
    layout: ShardLayout,
    tensor: Callable[[str], ExternalTensor],
    weight_format: WeightFormat,
) -> tuple[GraphSegment, ...]:
    """Graphs of the shard in execution order; `tensor` tells where a named tensor lies."""
    return _Lowering(spec, layout, tensor, weight_format).run()


class _Lowering:
    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        tensor: Callable[[str], ExternalTensor],
        weight_format: WeightFormat,
    ) -> None:
        self.spec = spec
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

    def run(self) -> tuple[GraphSegment, ...]:
        if self.layout.is_first_stage:
            self._embed()
        else:
            self.hidden = self._hidden_input("hidden")
        for layer in self.layout.layers:
            self._attention(layer)
            self._mlp(layer)
        if not self.layout.is_last_stage:
            self._add_addend()
            self._output(self.hidden, "hidden_out", "tokens")
            self._cut(None)
        elif self.layout.vocab:
            self._head()
            self._cut(None)
        return tuple(self.segments)

    def _embed(self) -> None:
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

    def _attention(self, layer: int) -> None:
        p = f"layers.{layer}."
        if not self.layout.num_heads:
            self._contribute_nothing()
            return
        normed = self._norm(f"{p}attention_norm")
        qkv = self._linear(normed, f"{p}qkv")
        graph, spec, layout = self.graph, self.spec, self.layout
        cache: list[int | str] = [
            "batch",
            layout.num_kv_heads,
            "context",
            cache_head_size(spec.head_size),
        ]
        names = AttentionNames(
            cos=graph.input("cos", np.float32, ["context", spec.head_size // 2]),
            sin=graph.input("sin", np.float32, ["context", spec.head_size // 2]),
            positions=""
            if spec.head_size % ROTARY_MULTIPLE == 0
            else graph.input("positions", np.int64, ["batch", "tokens"]),
            lengths=graph.input("lengths", np.int32, ["batch"]),
            total=graph.input("total", np.int32, []),
        )
        output, present_key, present_value = attention(
            graph,
            qkv,
            graph.input(f"past_key_{layer}", np.float32, cache),
            graph.input(f"past_value_{layer}", np.float32, cache),
            names,
            num_heads=layout.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_size=spec.head_size,
            window=spec.windows[layer],
            query_norm=self._vector(f"{p}query_norm"),
            key_norm=self._vector(f"{p}key_norm"),
            epsilon=spec.norm_epsilon,
        )
        for value, name in ((present_key, "key"), (present_value, "value")):
            graph.output(value, f"present_{name}_{layer}", np.float32, cache)
            self.outputs.append(f"present_{name}_{layer}")
        self._contribute(self._linear(output, f"{p}output"))

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
            )
        )
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
        return self._weight(name) if name in self.vectors else None

    def _weight(self, name: str) -> str:
        return self.graph.weight(name, self.tensor(name))
