"""Builds a shard's graphs, each from one sum over shards to the next.

Knows nodes, weights and cuts. `ResidualStream` knows what passes between graphs, and the module of
each kind of part what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge.backends.onnx.open_segment import LayerNames, OpenSegment
from edge.backends.onnx.products import Matrix, chosen_products, pad, product
from edge.backends.onnx.segments import (
    GraphSegment,
    Reduced,
    StoredStack,
    Streamed,
    StreamedExperts,
    gram_names,
)
from edge.kernels.experts.onnx import count_uses
from edge.kernels.onnx_graph import OnnxGraph, Provider, Weight
from edge.models.parts import MatrixSlice
from edge.models.spec import ModelSpec
from edge.weights.file_blocks import FileBlocks
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout
from edge.weights.observation import ObservedExperts, ObservedRun, observed_runs
from edge.weights.recipe import StoredMatrix


class ObservedInputs:
    """Sums over the inputs of a shard's products, as inputs and outputs of its graphs.

    Each graph adds to the sums so far.
    """

    def __init__(self, layout: ShardLayout, *, is_asked_for: bool) -> None:
        self.runs = observed_runs(layout) if is_asked_for else ()
        self._layout = layout

    def observe(self, segment: OpenSegment, x: str, name: str) -> None:
        """Add the matrix's input to its sums, if it is observed."""
        runs = [each for each in self.runs if isinstance(each, ObservedRun)]
        runs = [run for run in runs if run.matrix == name]
        if not runs:
            return
        graph, columns = segment.graph, len(self._layout.matrix(name).columns)
        rows = graph.node("Reshape", x, graph.constant(f"rows_{columns}", np.array([-1, columns])))
        for run in runs:
            inputs = rows
            if len(run.columns) < columns:
                places = (run.inputs.start, run.inputs.stop, 1)
                ends = [graph.constant(f"place_{each}", np.array([each])) for each in places]
                inputs = graph.node("Slice", rows, *ends)
            before, after = gram_names(run)
            gram = segment.input(before, np.float32, run.shape)
            total = graph.node("Gemm", inputs, inputs, gram, transA=1)
            segment.output(total, after, np.float32, run.shape)

    def count_experts(self, segment: OpenSegment, layer: int, chosen: Callable[[], str]) -> None:
        """Count the rows of each expert, too. chosen [rows, top_k]: the experts of each row."""
        for run in self.runs:
            if isinstance(run, ObservedExperts) and run.layer == layer:
                before, after = gram_names(run)
                counts = segment.input(before, np.float32, run.shape)
                counted = count_uses(segment.graph, chosen(), num_experts=run.num_experts)
                total = segment.graph.node("Add", counts, counted)
                segment.output(total, after, np.float32, run.shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a graph that has keys and values, or states: of all requests of a step together,
    or of one of them."""

    number: int | None = None
    """The request's place in the step; None: all requests."""

    @property
    def size(self) -> int | str:
        """The first size of hidden states, as a dimension."""
        return "batch" if self.number is None else 1

    @property
    def requests(self) -> int | str:
        """Number of requests, as a dimension: see `Step.is_mixed`."""
        return "requests" if self.number is None else 1

    def named(self, name: str) -> str:
        """Name of an input, output or dimension of this part."""
        return name if self.number is None else f"{name}.{self.number}"


class SegmentBuilder:
    """Builds the graphs of a shard one after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        tensor: Callable[[str], Weight],
        weight_format: WeightFormat,
        kv_bits: int | None,
        *,
        stacks: Mapping[int, StoredStack],
        joins_experts: bool,
        cut_layers: bool,
        cuts_experts: bool,
        observes: bool,
        provider: Provider,
        requests: int | None,
    ) -> None:
        """See `lower`."""
        self._provider: Provider = provider
        self._requests = requests
        self.spec = spec
        self.layout = layout
        self.kv_bits = kv_bits
        self.stacks = stacks
        self._joins_experts = joins_experts
        self.cuts_experts = cuts_experts
        self.observed = ObservedInputs(layout, is_asked_for=observes)
        self.segments: list[GraphSegment] = []
        self.segment = OpenSegment(0, LayerNames(), provider)
        self.kind = ""
        """The kind of the next segment of a streamed layer."""
        self._tensor = tensor
        self._format = weight_format
        self._knows_cache_layer = cut_layers or layout.is_split
        self._vectors = {vector.name for vector in layout.vectors}
        self._matrices = {matrix.name: matrix for matrix in layout.matrices}

    @property
    def graph(self) -> OnnxGraph:
        return self.segment.graph

    def hidden_input(self, name: str, *, parts: int = 1) -> str:
        return self.graph.input(name, np.float32, self._hidden_shape(parts))

    def hidden_input_of(self, layer: int, name: str) -> str:
        """An input of this layer, of the size of the hidden state."""
        return self.segment.input(f"{name}_{layer}", np.float32, self._hidden_shape(1))

    def hidden_output(self, value: str, name: str, *, parts: int = 1) -> None:
        self.segment.output_of_all(value, name, np.float32, self._hidden_shape(parts))

    def _hidden_shape(self, parts: int) -> list[int | str]:
        return ["batch", "tokens", parts * self.spec.hidden_size]

    def input(self, name: str, dtype: type[np.generic], shape: list[int | str]) -> str:
        return self.segment.input(name, dtype, shape)

    def output(
        self, value: str, name: str, dtype: type[np.generic], shape: list[int | str]
    ) -> None:
        self.segment.output(value, name, dtype, shape)

    def by_entry(self, face: Callable[..., str], *values: str) -> str:
        """The output of `face(entry, *values)`, with values and output [batch, …]. Called for each
        request if graphs are lowered for a number of requests."""
        if self._requests is None or self._requests == 1:
            return face(Entry(None if self._requests is None else 0), *values)
        graph = self.graph

        def place(number: int) -> str:
            return graph.constant(f"request_{number}", np.asarray([number], np.int64))

        outputs = []
        for number in range(self._requests):
            ends = place(number), place(number + 1), place(0)
            own = [graph.node("Slice", value, *ends) for value in values]
            outputs.append(face(Entry(number), *own))
        return graph.node("Concat", *outputs, axis=0)

    def weight(self, name: str) -> str:
        return self.segment.weight(name, self._tensor(name))

    def has_vector(self, name: str) -> bool:
        return name in self._vectors

    def vector(self, name: str, *, stays: bool = False) -> str | None:
        """The value of a vector; None if the shard lacks it. stays: the graph has no matrices, so
        it holds the vector even if layers are streamed."""
        if name not in self._vectors:
            return None
        if self.segment.names.streamed is None or stays:
            return self.weight(name)
        return self.segment.vector_input(name, self._tensor(name).shape)

    def own_vector(self, name: str, *, stays: bool = False) -> str:
        """The value of a vector that the shard must have."""
        found = self.vector(name, stays=stays)
        assert found is not None
        return found

    def vector_size(self, name: str) -> int:
        return math.prod(self._tensor(name).shape)

    def kinds_of_layer(self, layer: int) -> str:
        """The kinds of a layer's matrices, in which otherwise equal layers may differ."""
        prefix = f"layers.{layer}."
        matrices = [each for each in self.layout.matrices if each.name.startswith(prefix)]
        return self._kinds(matrices)

    def kinds_of(self, *names: str) -> str:
        """The kinds of these matrices."""
        return self._kinds(self._matrices[name] for name in names)

    def _kinds(self, matrices: Iterable[MatrixSlice]) -> str:
        return ", ".join(repr(each.kind) for each in self._format.recipe.all_stored(matrices))

    def linear(self, x: str, name: str) -> str:
        """The product with a matrix of the layout, and its bias."""
        self.observed.observe(self.segment, x, name)
        return self.linear_unobserved(x, name)

    def linear_unobserved(self, x: str, name: str) -> str:
        """The product and its bias, without observing the input."""
        products = [self._product(x, each) for each in self._stored(name)]
        whole = products[0]
        if len(products) > 1:
            whole = self.graph.node("Concat", *products, axis=-1)
        bias = self.vector(f"{name}.bias")
        return whole if bias is None else self.graph.node("Add", whole, bias)

    def are_joined(self, names: Sequence[str]) -> bool:
        """Whether `chosen_products` takes these matrices of experts."""
        if not self._joins_experts or self.segment.names.streamed is not None:
            return False
        forms = {tuple(each.kind for each in self._stored(name)) for name in names}
        return len(forms) == 1 and all(isinstance(kind, FileBlocks) for kind in forms.pop())

    def chosen_products(self, x: str, chosen: str, names: Sequence[str]) -> str:
        """x [..., columns], chosen [uses] → [1, uses, rows]: see `products.chosen_products`."""
        products = [
            chosen_products(
                self.graph,
                pad(self.graph, x, alike[0].padding),
                chosen,
                list(map(self._matrix, alike)),
            )
            for alike in zip(*map(self._stored, names), strict=True)
        ]
        return products[0] if len(products) == 1 else self.graph.node("Concat", *products, axis=-1)

    def _stored(self, name: str) -> Sequence[StoredMatrix]:
        return self._format.recipe.stored(self._matrices[name])

    def _product(self, x: str, stored: StoredMatrix) -> str:
        return product(self.graph, pad(self.graph, x, stored.padding), self._matrix(stored))

    def _matrix(self, stored: StoredMatrix) -> Matrix:
        return Matrix(
            kind=stored.kind,
            accuracy=self._format.accuracy,
            rows=len(stored.rows),
            columns=stored.columns,
            array=lambda suffix: self.weight(f"{stored.name}.{suffix}"),
            is_loose=self.segment.names.streamed is not None,
        )

    def cut(
        self,
        reduce: Reduced | None,
        *,
        partial_is_zero: bool = False,
        parts: int = 1,
        experts: StreamedExperts | None = None,
    ) -> None:
        """Close the graph, and open the next one. See `GraphSegment`."""
        done, layer = self.segment, self.segment.names.streamed
        streamed: Streamed | None = None
        if layer is not None and not partial_is_zero:
            vectors = tuple(done.vectors.items())
            streamed = Streamed(layer=layer, kind=self.kind, vectors=vectors, experts=experts)
        self.segments.append(
            GraphSegment(
                model=done.graph.build(),
                inputs=done.graph.input_names,
                outputs=tuple(done.outputs),
                reduce=reduce,
                partial_parts=parts,
                partial_is_zero=partial_is_zero,
                cache_layer=done.cache_layer if self._knows_cache_layer else None,
                streamed=streamed,
            )
        )
        self.segment = OpenSegment(len(self.segments), done.names, self._provider)
