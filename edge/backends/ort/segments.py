"""Graphs under construction: what a shard computes between two sums, and how it names its weights.

Knows nodes, the residual stream and where a graph ends; what the parts of a layer compute is told
by the module of each kind of part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge.backends.ort.expert_stacks import ExpertStack
from edge.backends.ort.products import Matrix, pad, product
from edge.kernels.experts.onnx import count_uses
from edge.kernels.layer_norm.onnx import add_layer_norm, layer_norm
from edge.kernels.onnx_graph import ExternalTensor, OnnxGraph
from edge.kernels.rms_norm.onnx import add_rms_norm, rms_norm
from edge.models.parts import MatrixSlice
from edge.models.spec import ModelSpec
from edge.weights.formats import WeightFormat
from edge.weights.layout import ShardLayout
from edge.weights.observation import Observed, ObservedExperts, ObservedRun, observed_runs
from edge.weights.recipe import StoredMatrix

Reduced = Literal["hidden", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSegment:
    """One graph and what happens after it.

    Inputs and outputs are among `tokens`, `rows`, `hidden`, `partial`, `positions`, the tables of
    `rotation_names`, the sums of `gram_names`, `lengths`, `total`, `past_key_N`, `past_value_N`,
    `key_scales_N`, `value_scales_N` and `hidden_out`, `partial_out`, `logits`, `present_key_N`,
    `present_value_N`; `embedded` and `token_rows_N` where layers have inputs of each token;
    `kept_N` and `kept_out_N` of layers whose input others need; where experts are brought in also
    the fields of `kernels.experts.onnx.Routed` as `expert_…`, then `expert_results`.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduce: Reduced | None
    """Which output is summed over the stage's shards before the next segment."""
    partial_parts: int
    """Hidden states side by side in what is summed."""
    partial_is_zero: bool
    """This shard contributes nothing to the sum (it holds no heads, or no ffn columns)."""
    cache_layer: int | None = None
    """Whose keys and values it takes, where no graph takes those of several layers."""
    streamed: Streamed | None = None
    """Set where the matrices are brought in from disk, for good or for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The parts of a streamed layer's segment that are not its graph.

    Its names are without the layer's number (`past_key`, `qkv.codes`), and what is no matrix is an
    input: segments of equal `kind` differ in the places of their weights only.
    """

    layer: int
    kind: str
    vectors: tuple[tuple[str, str], ...]
    """(input, tensor of the shard's file)."""
    experts: StreamedExperts | None = None
    """What is computed behind this graph, of what it puts out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedExperts:
    """A graph for each expert of a layer, with `x` [1, rows, hidden] and `results`.

    Those of a kind differ in the places of their weights only, in all layers.
    """

    kind: str
    models: tuple[bytes, ...]
    biases: tuple[tuple[str, str], ...]
    """(input, tensor of the shard's file, which has as many values of each expert)."""
    top_k: int
    """How many of these each row goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What becomes of a part's product once it is summed over shards, by names of vectors.

    It is normed, if there is that norm, and added to the hidden state; then both are multiplied, if
    there is a scale. A product may be several side by side, each with a norm, which are added to
    each other first.
    """

    norm: str | None = None
    scale: str | None = None
    apart: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        return len(self.apart) or 1


def gram_names(run: Observed) -> tuple[str, str]:
    """The input and the output of its sums so far; both are the same memory."""
    if isinstance(run, ObservedExperts):
        return f"uses_{run.layer}", f"uses_out_{run.layer}"
    matrix, layer = run.matrix, ""
    if matrix.startswith("layers."):
        _layers, number, matrix = matrix.split(".", 2)
        layer = f"_{number}"
    name = f"{matrix}.{run.columns.start}{layer}"
    return f"gram.{name}", f"gram_out.{name}"


def rotation_names(number: int) -> tuple[str, str]:
    """Inputs of the rotary tables [context, pairs] of `ShardLayout.rotations[number]`."""
    return (f"cos.{number}", f"sin.{number}") if number else ("cos", "sin")


NOTHING_BEHIND = Behind()


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a graph calls things of a layer: by its number, but for the layer that is streamed."""

    streamed: int | None = None
    prefix: str = ""
    """Within the layer: left out, too."""

    def local(self, name: str) -> str:
        if self.streamed is None:
            return name
        local = name.removeprefix(f"layers.{self.streamed}.").removesuffix(f"_{self.streamed}")
        return local.removeprefix(self.prefix)


@dataclass(slots=True, kw_only=True)
class _OpenSegment:
    """A graph that nodes may be added to."""

    graph: OnnxGraph
    outputs: list[str] = field(default_factory=list)
    vectors: dict[str, str] = field(default_factory=dict)
    """By input, of a streamed layer."""
    cache_layer: int | None = None
    kept: dict[int, str] = field(default_factory=dict)
    """By layer, what it was given: where that is a value of this graph."""


class SegmentBuilder:
    """The graphs of a shard one after the other, and the residual stream that goes through them."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ShardLayout,
        tensor: Callable[[str], ExternalTensor | NDArray[Any]],
        weight_format: WeightFormat,
        kv_bits: int | None,
        *,
        stacks: Mapping[int, ExpertStack],
        cut_layers: bool,
        cuts_experts: bool,
        observes: bool,
    ) -> None:
        """See `lower`."""
        self.cuts_experts = cuts_experts
        self.stacks = stacks
        self.spec = spec
        self.layout = layout
        self.kv_bits = kv_bits
        self.segments: list[GraphSegment] = []
        self.hidden = ""
        self.addend: str | None = None
        """A product not yet added to the hidden state; the next norm adds it on its way."""
        self.behind = NOTHING_BEHIND
        """What it goes through first, where it was summed over shards only just now."""
        self.scale: str | None = None
        """What the sum of both is multiplied by, once both are there."""
        self.nothing: str | None = None
        """The addend that a stage begins with, and what follows where a layer is scaled."""
        self.names = LayerNames()
        self.kind = ""
        """The next segment's, where a layer is streamed."""
        self._tensor = tensor
        self._format = weight_format
        self._runs = observed_runs(layout) if observes else ()
        self._knows_cache_layer = cut_layers or layout.is_split
        self._vectors = {vector.name for vector in layout.vectors}
        self._matrices = {matrix.name: matrix for matrix in layout.matrices}
        self._open = _OpenSegment(graph=OnnxGraph("segment_0"))

    @property
    def graph(self) -> OnnxGraph:
        return self._open.graph

    def hidden_input(self, name: str, *, parts: int = 1) -> str:
        columns = parts * self.spec.hidden_size
        return self.graph.input(name, np.float32, ["batch", "tokens", columns])

    def input(self, name: str, dtype: type[np.generic], shape: list[int | str]) -> str:
        return self.graph.input(self.names.local(name), dtype, shape)

    def output(
        self, value: str, name: str, dtype: type[np.generic], shape: list[int | str]
    ) -> None:
        name = self.names.local(name)
        self.graph.output(value, name, dtype, shape)
        self._open.outputs.append(name)

    def takes_cache_of(self, layer: int) -> None:
        self._open.cache_layer = layer

    def weight(self, name: str) -> str:
        return self.graph.weight(self.names.local(name), self._tensor(name))

    def has_vector(self, name: str) -> bool:
        return name in self._vectors

    def behind_part(self, norm: str, *, scale: str = "", apart: Sequence[str] = ()) -> Behind:
        """What is behind a part: those of these vectors that there are."""
        return Behind(
            norm=norm if self.has_vector(norm) else None,
            scale=scale if self.has_vector(scale) else None,
            apart=tuple(name for name in apart if self.has_vector(name)),
        )

    def vector(self, name: str, *, stays: bool = False) -> str | None:
        """None where the shard has no such vector. `stays`: the graph has no matrices, so that it
        is none of those whose weights are brought in."""
        if name not in self._vectors:
            return None
        if self.names.streamed is None or stays:
            return self.weight(name)
        local = self.names.local(name)
        if local.startswith("layers."):  # the layer before has other numbers in each graph
            local = f"before.{local.rsplit('.', 1)[-1]}"
        self.graph.input(local, np.float32, list(self._tensor(name).shape))
        self._open.vectors[local] = name
        return local

    def own_vector(self, name: str) -> str:
        """One that the shard has."""
        found = self.vector(name)
        assert found is not None
        return found

    def weights_of(self, layer: int) -> str:
        """The kinds of a layer's matrices: layers that are alike in all else may differ in them."""
        prefix = f"layers.{layer}."
        matrices = [each for each in self.layout.matrices if each.name.startswith(prefix)]
        return self._kinds(matrices)

    def kinds_of(self, *names: str) -> str:
        """The kinds of these matrices."""
        return self._kinds(self._matrices[name] for name in names)

    def _kinds(self, matrices: Iterable[MatrixSlice]) -> str:
        return ", ".join(repr(each.kind) for each in self._format.recipe.all_stored(matrices))

    def vector_size(self, name: str) -> int:
        return math.prod(self._tensor(name).shape)

    def norm(self, weight: str) -> str:
        """The hidden state with what was yet to be added to it; normed if there is the weight."""
        self._multiply()
        name = self.vector(weight)
        if name is None:
            self._add_addend()
            return self.hidden
        epsilon, addend = self.spec.norm_epsilon, self._take_addend()
        bias = self.vector(f"{weight}_bias")
        if bias is not None:
            return self._layer_norm(addend, name, bias)
        if addend is None:
            return rms_norm(self.graph, self.hidden, name, epsilon=epsilon)
        normed, self.hidden = add_rms_norm(self.graph, self.hidden, addend, name, epsilon=epsilon)
        return normed

    def _layer_norm(self, addend: str | None, weight: str, bias: str) -> str:
        epsilon = self.spec.norm_epsilon
        if addend is None:
            return layer_norm(self.graph, self.hidden, weight, bias, epsilon=epsilon)
        normed, self.hidden = add_layer_norm(
            self.graph, self.hidden, addend, weight, bias, epsilon=epsilon
        )
        return normed

    @property
    def observes(self) -> bool:
        return bool(self._runs)

    def observe(self, x: str, name: str) -> None:
        """Add what the matrix is given to what it was given before, if that is asked for."""
        runs = [each for each in self._runs if isinstance(each, ObservedRun)]
        runs = [run for run in runs if run.matrix == name]
        if not runs:
            return
        graph, columns = self.graph, len(self.layout.matrix(name).columns)
        rows = graph.node("Reshape", x, graph.constant(f"rows_{columns}", np.array([-1, columns])))
        for run in runs:
            inputs = rows
            if len(run.columns) < columns:
                places = (run.inputs.start, run.inputs.stop, 1)
                ends = [graph.constant(f"place_{each}", np.array([each])) for each in places]
                inputs = graph.node("Slice", rows, *ends)
            before, after = gram_names(run)
            gram = self.input(before, np.float32, list(run.shape))
            self.output(
                graph.node("Gemm", inputs, inputs, gram, transA=1),
                after,
                np.float32,
                list(run.shape),
            )

    def count_experts(self, layer: int, chosen: Callable[[], str]) -> None:
        """Likewise how many rows go through each expert. chosen [rows, top_k]: which those are."""
        for run in self._runs:
            if isinstance(run, ObservedExperts) and run.layer == layer:
                before, after = gram_names(run)
                counts = self.input(before, np.float32, list(run.shape))
                counted = count_uses(self.graph, chosen(), num_experts=run.num_experts)
                total = self.graph.node("Add", counts, counted)
                self.output(total, after, np.float32, list(run.shape))

    def linear(self, x: str, name: str) -> str:
        """The product with a matrix of the layout, and its bias."""
        self.observe(x, name)
        return self.linear_unobserved(x, name)

    @contextlib.contextmanager
    def within(self, branch: OnnxGraph, *, prefix: str = "") -> Iterator[None]:
        """Nodes are put into a branch of the graph for as long, or into a graph of its own, which
        calls weights of a streamed layer by what is behind this prefix."""
        outer, names = self._open.graph, self.names
        self._open.graph, self.names = branch, replace(names, prefix=prefix)
        try:
            yield
        finally:
            self._open.graph, self.names = outer, names

    def linear_unobserved(self, x: str, name: str) -> str:
        """The same where what the matrix is given is not all that counts."""
        stored = self._format.recipe.stored(self._matrices[name])
        products = [self._product(x, each) for each in stored]
        whole = products[0]
        if len(products) > 1:
            whole = self.graph.node("Concat", *products, axis=-1)
        bias = self.vector(f"{name}.bias")
        return whole if bias is None else self.graph.node("Add", whole, bias)

    def _product(self, x: str, stored: StoredMatrix) -> str:
        matrix = Matrix(
            kind=stored.kind,
            accuracy=self._format.accuracy,
            rows=len(stored.rows),
            columns=stored.columns,
            array=lambda suffix: self.weight(f"{stored.name}.{suffix}"),
        )
        return product(self.graph, pad(self.graph, x, stored.padding), matrix)

    def is_kept(self, layer: int) -> bool:
        """Others need what the layer is given."""
        return layer in self.spec.lenders

    def keep(self, layer: int) -> None:
        """The hidden state, to which nothing is to be added still, is what the layer is given."""
        self._add_addend(stays=True)
        self._open.kept[layer] = self.hidden
        name = f"kept_out_{layer}"
        self.graph.output(self.hidden, name, np.float32, ["batch", "tokens", self.spec.hidden_size])
        self._open.outputs.append(name)

    def kept(self, layer: int, norm: str) -> str:
        """What that layer was given, normed by this weight: to the bit as it was normed there."""
        x = self._open.kept.get(layer) or self.hidden_input(f"kept_{layer}")
        nothing, weight = self.graph.node("Sub", x, x), self.own_vector(norm)
        normed, _ = add_rms_norm(self.graph, x, nothing, weight, epsilon=self.spec.norm_epsilon)
        return normed

    def whole_hidden(self) -> str:
        """The hidden state with all that was to be added to it."""
        self._add_addend()
        return self.hidden

    def begin_stage(self) -> None:
        """Take the hidden state of the stage before, with nothing to be added to it still.

        The first norm then is the kernel that adds as well, as it is behind every other layer:
        another one would round in another way, and where stages are cut must not matter.
        """
        self.hidden = self.hidden_input("hidden")
        self._add_nothing()

    def contribute(self, product: str, behind: Behind) -> None:
        """A part's product is to be added to the hidden state, once it is summed over shards."""
        self.addend, self.behind = product, behind
        if self.layout.is_split:
            self._hidden_output(self.hidden, "hidden_out")
            self._hidden_output(product, "partial_out", parts=behind.parts)
            self.cut("partial", behind=behind)
        else:
            self._add_behind(behind)

    def contribute_whole(self, product: str, behind: Behind) -> None:
        """The same of what every shard computes for itself."""
        self.addend, self.behind = product, behind
        self._add_behind(behind)

    def _add_behind(self, behind: Behind) -> None:
        self.addend, self.scale = self._take_addend(), behind.scale
        self._multiply()

    def contribute_nothing(self, behind: Behind) -> None:
        """The same of a part that the shard has no units of."""
        self._add_addend(stays=True)
        self._hidden_output(self.hidden, "hidden_out")
        self.cut("partial", partial_is_zero=True, behind=behind)

    def sum_hidden(self) -> None:
        """End the graph with this shard's part of the hidden state."""
        self._hidden_output(self.hidden, "hidden_out")
        self.cut("hidden")

    def carry_over(self) -> None:
        """Cut inside a stage that is not split. The next graph adds, as it would have without."""
        carried = self.addend
        self._hidden_output(self.hidden, "hidden_out")
        if carried is not None:
            self._hidden_output(carried, "partial_out")
        self.cut(None)
        if carried is not None:
            self.addend = self.hidden_input("partial")

    def cut_within(
        self, values: Sequence[str], done: str, *, experts: StreamedExperts
    ) -> Sequence[str]:
        """Cut inside a part of a streamed layer; the next graph has these values [batch, tokens,
        hidden] of the part, and the hidden state. `done`: what the graph is of its layer; the first
        of the values is what the experts are given."""
        parts = len(values)
        together = self.graph.node("Concat", *values, axis=-1) if parts > 1 else values[0]
        self._hidden_output(self.hidden, "hidden_out")
        self._hidden_output(together, "partial_out", parts=parts)
        kind, self.kind = self.kind, f"{self.kind}, {done}"
        self.cut(None, experts=experts, parts=parts)
        self.kind = kind
        together = self.hidden_input("partial", parts=parts)
        if parts == 1:
            return (together,)
        return self.graph.nodes("Split", together, outputs=parts, axis=-1)

    def hand_over(self) -> None:
        """End the graph with the whole hidden state."""
        self._add_addend()
        self._hidden_output(self.hidden, "hidden_out")
        self.cut(None)

    def cut(
        self,
        reduce: Reduced | None,
        *,
        partial_is_zero: bool = False,
        behind: Behind = NOTHING_BEHIND,
        experts: StreamedExperts | None = None,
        parts: int = 1,
    ) -> None:
        """Close the graph; the next one starts from what this one put out."""
        done, layer = self._open, self.names.streamed
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
                partial_parts=max(parts, behind.parts),
                partial_is_zero=partial_is_zero,
                cache_layer=done.cache_layer if self._knows_cache_layer else None,
                streamed=streamed,
            )
        )
        self._open = _OpenSegment(graph=OnnxGraph(f"segment_{len(self.segments)}"))
        self.hidden = self.hidden_input("hidden")
        self.addend = None
        if reduce == "partial":
            self.addend = self.hidden_input("partial", parts=behind.parts)
        self.behind, self.scale = behind, behind.scale

    def _add_nothing(self) -> None:
        """The next norm then is the kernel that adds as well."""
        self.addend = self.nothing = self.graph.node("Sub", self.hidden, self.hidden)

    def _multiply(self, *, stays: bool = False) -> None:
        """Make the hidden state what a scaled layer gives, as if a stage began behind it."""
        if self.scale is None:
            return
        scale = self.vector(self.scale, stays=stays)
        assert scale is not None
        self.scale = None
        self._add_addend(stays=stays)
        self.hidden = self.graph.node("Mul", self.hidden, scale)
        self._add_nothing()

    def _hidden_output(self, value: str, name: str, *, parts: int = 1) -> None:
        columns = parts * self.spec.hidden_size
        self.output(value, name, np.float32, ["batch", "tokens", columns])

    def _add_addend(self, *, stays: bool = False) -> None:
        self._multiply(stays=stays)
        addend = self._take_addend(stays=stays)
        if addend is not None:
            self.hidden = self.graph.node("Add", self.hidden, addend)

    def _take_addend(self, *, stays: bool = False) -> str | None:
        """What is to be added to the hidden state, as it is added."""
        addend, behind = self.addend, self.behind
        self.addend, self.behind = None, NOTHING_BEHIND
        if addend is None:
            return None
        if behind.apart:
            apart = self.graph.nodes("Split", addend, outputs=len(behind.apart), axis=-1)
            first, *rest = (
                self._normed(each, name, stays=stays)
                for each, name in zip(apart, behind.apart, strict=True)
            )
            addend = first
            for each in rest:
                addend = self.graph.node("Add", addend, each)
        return addend if behind.norm is None else self._normed(addend, behind.norm, stays=stays)

    def _normed(self, x: str, weight: str, *, stays: bool) -> str:
        name = self.vector(weight, stays=stays)
        assert name is not None
        return rms_norm(self.graph, x, name, epsilon=self.spec.norm_epsilon)
