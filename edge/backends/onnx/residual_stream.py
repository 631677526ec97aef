"""The residual stream: the hidden state, its addend, and how both cross a cut."""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.onnx.after_product import NOTHING_AFTER, AfterProduct, normed_product
from edge.backends.onnx.segment_builder import SegmentBuilder
from edge.backends.onnx.segments import Reduced, StreamedExperts
from edge.kernels.layer_norm.onnx import add_layer_norm, layer_norm
from edge.kernels.rms_norm.onnx import add_rms_norm, rms_norm


class ResidualStream:
    """The hidden state of a shard while its graphs are built.

    A part's product is not added at once; the kernel of the next norm adds it.
    """

    def __init__(self, build: SegmentBuilder) -> None:
        self._build = build
        self._hidden = ""
        self._addend: str | None = None
        """A product not yet added to the hidden state."""
        self._after = NOTHING_AFTER
        """Norms that the addend still needs, if it was just summed over shards."""
        self._scale: str | None = None
        """Name of the factor for the sum of hidden state and addend."""
        self._nothing: str | None = None
        """The addend of zeros at the start of a stage, and after a scaled layer."""
        self._kept: dict[int, str] = {}
        """Inputs of layers that are values of this graph, by layer."""

    @property
    def adds_zeros(self) -> bool:
        """Whether the addend is all zeros."""
        return self._addend is not None and self._addend == self._nothing

    @property
    def is_under_way(self) -> bool:
        """Whether the graph has nodes, or an addend that is not added yet."""
        return bool(self._build.graph.num_nodes) or self._addend is not None

    @property
    def adds(self) -> str:
        """The addend of the next norm, in words. Graphs with the same words have the same nodes for
        it."""
        if self._addend is None:
            return "nothing"
        if self.adds_zeros:
            return "zeros"
        added = (self._after.norm or "plainly").rsplit(".", 1)[-1]
        added += ", apart" * bool(self._after.apart)
        return added if self._scale is None else f"{added}, scaled"

    def begin_tower(self, patches: str) -> None:
        """Begin with patches and their positions."""
        self._hidden = patches

    def begin_tower_part(self, hidden: str) -> None:
        """Begin with the hidden state of the part before, as `begin_stage`."""
        self._hidden = hidden
        self._add_nothing()

    def begin_model(self) -> None:
        """Begin with the embedding's rows, which are an input. Of a divided table, sum them over
        the shards."""
        self._hidden = self._build.hidden_input("hidden")
        if self._build.layout.sums_embedding:
            self._hidden = self._build.graph.node("Identity", self._hidden)
            self._build.hidden_output(self._hidden, "hidden_out")
            self._cut("hidden")

    def begin_stage(self) -> None:
        """Begin with the hidden state of the stage before, and an addend of zeros.

        With an addend, the first norm is the same kernel as after every other layer. Another kernel
        would round differently, and results must not depend on cuts between stages.
        """
        self._hidden = self._build.hidden_input("hidden")
        self._add_nothing()

    def begin_further_head(self) -> None:
        """Begin with the embedding's rows and hidden states from outside, which are joined."""
        build = self._build
        graph, epsilon = build.graph, build.spec.norm_epsilon
        normed = [
            rms_norm(graph, build.hidden_input(value), build.own_vector(weight), epsilon=epsilon)
            for value, weight in (("hidden", "embedding_norm"), ("partial", "state_norm"))
        ]
        joined = graph.node("Concat", *normed, axis=-1)
        self._hidden = build.linear(joined, "input_projection")
        self._add_nothing()

    def norm(self, weight: str) -> str:
        """Add the addend to the hidden state; normed if the model has this norm."""
        self._multiply()
        name = self._build.vector(weight)
        if name is None:
            self._add()
            return self._hidden
        graph, epsilon, addend = self._build.graph, self._build.spec.norm_epsilon, self._take()
        bias = self._build.vector(f"{weight}_bias")
        if bias is not None:
            return self._layer_norm(addend, name, bias)
        if addend is None:
            return rms_norm(graph, self._hidden, name, epsilon=epsilon)
        normed, self._hidden = add_rms_norm(graph, self._hidden, addend, name, epsilon=epsilon)
        return normed

    def _layer_norm(self, addend: str | None, weight: str, bias: str) -> str:
        graph, epsilon = self._build.graph, self._build.spec.norm_epsilon
        if addend is None:
            return layer_norm(graph, self._hidden, weight, bias, epsilon=epsilon)
        normed, self._hidden = add_layer_norm(
            graph, self._hidden, addend, weight, bias, epsilon=epsilon
        )
        return normed

    def whole_hidden(self) -> str:
        """Add the addend to the hidden state, without a norm."""
        self._add()
        return self._hidden

    def take_rows(self, rows: str) -> None:
        """Go on with these tokens only."""
        graph = self._build.graph
        self._hidden = graph.node("Gather", self._hidden, rows, axis=1)
        if self._addend is not None:
            self._addend = graph.node("Gather", self._addend, rows, axis=1)

    def keep(self, layer: int) -> None:
        """Complete the hidden state, and output it as the input of this layer for later layers."""
        self._add(stays=True)
        self._kept[layer] = self._hidden
        self._build.hidden_output(self._hidden, f"kept_out_{layer}")

    def kept(self, layer: int, norm: str) -> str:
        """The input of an earlier layer, normed by this weight with the same bits as there."""
        build = self._build
        x = self._kept.get(layer) or build.hidden_input(f"kept_{layer}")
        nothing, weight = build.graph.node("Sub", x, x), build.own_vector(norm)
        epsilon = build.spec.norm_epsilon
        normed, _ = add_rms_norm(build.graph, x, nothing, weight, epsilon=epsilon)
        return normed

    def add_picture_rows(self, layer: int) -> None:
        """Add the input for rows of pictures behind this layer, as if a stage began after it."""
        self._add(stays=True)
        rows = self._build.hidden_input_of(layer, "picture_rows")
        self._hidden = self._build.graph.node("Add", self._hidden, rows)
        self._add_nothing()

    def contribute(self, product: str, after: AfterProduct) -> None:
        """Make a part's product the addend, after a sum over shards."""
        if not self._build.layout.is_split:
            self.contribute_whole(product, after)
            return
        self._build.hidden_output(self._hidden, "hidden_out")
        self._build.hidden_output(product, "partial_out", parts=after.parts)
        self._cut("partial", after=after)

    def contribute_whole(self, product: str, after: AfterProduct) -> None:
        """Make a product the addend that every shard computes as a whole."""
        self._addend, self._after = product, after
        self._addend, self._scale = self._take(), after.scale
        self._multiply()

    def contribute_nothing(self, after: AfterProduct) -> None:
        """Take part in the sum over shards for a part of which this shard has no units."""
        self._add(stays=True)
        self._build.hidden_output(self._hidden, "hidden_out")
        self._cut("partial", partial_is_zero=True, after=after)

    def carry_over(self) -> None:
        """Cut inside a stage that is not split. The addend passes to the next graph."""
        carried = self._addend
        self._build.hidden_output(self._hidden, "hidden_out")
        if carried is not None:
            self._build.hidden_output(carried, "partial_out")
        self._cut(None)
        if carried is not None:
            self._addend = self._build.hidden_input("partial")

    def cut_within(
        self, values: Sequence[str], done: str, *, experts: StreamedExperts
    ) -> Sequence[str]:
        """Cut inside a part of a streamed layer. Returns these values [batch, tokens, hidden] in
        the next graph; the first one is the experts' input. done: kind of the graph that ends."""
        build, parts = self._build, len(values)
        together = build.graph.node("Concat", *values, axis=-1) if parts > 1 else values[0]
        build.hidden_output(self._hidden, "hidden_out")
        build.hidden_output(together, "partial_out", parts=parts)
        kind, build.kind = build.kind, f"{build.kind}, {done}"
        self._cut(None, experts=experts, parts=parts)
        build.kind = kind
        together = build.hidden_input("partial", parts=parts)
        if parts == 1:
            return (together,)
        return build.graph.nodes("Split", together, outputs=parts, axis=-1)

    def hand_over(self) -> None:
        """End the graph with the whole hidden state."""
        self._build.hidden_output(self.whole_hidden(), "hidden_out")
        self._cut(None)

    def _cut(
        self,
        reduce: Reduced | None,
        *,
        partial_is_zero: bool = False,
        after: AfterProduct = NOTHING_AFTER,
        experts: StreamedExperts | None = None,
        parts: int = 1,
    ) -> None:
        """Close the graph; the next one starts from its outputs."""
        parts = max(parts, after.parts)
        self._build.cut(reduce, partial_is_zero=partial_is_zero, experts=experts, parts=parts)
        self._kept = {}
        self._hidden = self._build.hidden_input("hidden")
        self._addend = None
        if reduce == "partial":
            self._addend = self._build.hidden_input("partial", parts=parts)
        self._after, self._scale = after, after.scale

    def _add_nothing(self) -> None:
        """Set an addend of zeros, so that the next norm uses the kernel that adds."""
        self._addend = self._nothing = self._build.graph.node("Sub", self._hidden, self._hidden)

    def _multiply(self, *, stays: bool = False) -> None:
        """Apply the scale of a layer, as if a stage began after it."""
        if self._scale is None:
            return
        scale = self._build.own_vector(self._scale, stays=stays)
        self._scale = None
        self._add(stays=stays)
        self._hidden = self._build.graph.node("Mul", self._hidden, scale)
        self._add_nothing()

    def _add(self, *, stays: bool = False) -> None:
        self._multiply(stays=stays)
        addend = self._take(stays=stays)
        if addend is not None:
            self._hidden = self._build.graph.node("Add", self._hidden, addend)

    def _take(self, *, stays: bool = False) -> str | None:
        """Remove the addend, and return it normed; None without one."""
        addend, after = self._addend, self._after
        self._addend, self._after = None, NOTHING_AFTER
        if addend is None:
            return None
        return normed_product(self._build, addend, after, stays=stays)
