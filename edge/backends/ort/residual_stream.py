"""The residual stream: the hidden state, its addend, and how both cross a cut."""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.ort.after_product import NOTHING_AFTER, AfterProduct, normed_product
from edge.backends.ort.segment_builder import SegmentBuilder
from edge.backends.ort.segments import Reduced, StreamedExperts
from edge.kernels.layer_norm.onnx import add_layer_norm, layer_norm
from edge.kernels.rms_norm.onnx import add_rms_norm, rms_norm


class ResidualStream:
    """The hidden state of a shard on its way through the graphs of a builder.

    A part's product is not added at once: the next norm adds it on its way.
    """

    def __init__(self, build: SegmentBuilder) -> None:
        self._build = build
        self._hidden = ""
        self._addend: str | None = None
        """A product not yet added to the hidden state."""
        self._after = NOTHING_AFTER
        """What it goes through first, where it was summed over shards only just now."""
        self._scale: str | None = None
        """What the sum of both is multiplied by, once both are there."""
        self._nothing: str | None = None
        """The addend that a stage begins with, and what follows where a layer is scaled."""
        self._kept: dict[int, str] = {}
        """By layer, what it was given: where that is a value of this graph."""

    @property
    def adds_zeros(self) -> bool:
        """Whether the addend is all zeros."""
        return self._addend is not None and self._addend == self._nothing

    @property
    def is_under_way(self) -> bool:
        """The graph has something that none before it has put out."""
        return bool(self._build.graph.num_nodes) or self._addend is not None

    @property
    def adds(self) -> str:
        """What the next norm adds to the hidden state, in words: graphs that add alike have the
        same nodes for it."""
        if self._addend is None:
            return "nothing"
        if self.adds_zeros:
            return "zeros"
        added = (self._after.norm or "plainly").rsplit(".", 1)[-1]
        added += ", apart" * bool(self._after.apart)
        return added if self._scale is None else f"{added}, scaled"

    def begin_model(self) -> None:
        """Take what the embedding has of each token, or this shard's part of that.

        The table stays on disk; its rows are given.
        """
        self._hidden = self._build.hidden_input("hidden")
        if self._build.layout.sums_embedding:
            self._hidden = self._build.graph.node("Identity", self._hidden)
            self._build.hidden_output(self._hidden, "hidden_out")
            self._cut("hidden")

    def begin_stage(self) -> None:
        """Take the hidden state of the stage before, with nothing to be added to it still.

        The first norm then is the kernel that adds as well, as after every other layer:
        another one would round in another way, and where stages are cut must not matter.
        """
        self._hidden = self._build.hidden_input("hidden")
        self._add_nothing()

    def norm(self, weight: str) -> str:
        """The hidden state with what was yet to be added to it; normed if there is the weight."""
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
        """The hidden state with all that was to be added to it."""
        self._add()
        return self._hidden

    def take_rows(self, rows: str) -> None:
        """Go on with these tokens only."""
        graph = self._build.graph
        self._hidden = graph.node("Gather", self._hidden, rows, axis=1)
        if self._addend is not None:
            self._addend = graph.node("Gather", self._addend, rows, axis=1)

    def keep(self, layer: int) -> None:
        """The hidden state, to which nothing is to be added still, is what the layer is given, and
        what others need of it."""
        self._add(stays=True)
        self._kept[layer] = self._hidden
        self._build.hidden_output(self._hidden, f"kept_out_{layer}")

    def kept(self, layer: int, norm: str) -> str:
        """What that layer was given, normed by this weight: to the bit as it was normed there."""
        build = self._build
        x = self._kept.get(layer) or build.hidden_input(f"kept_{layer}")
        nothing, weight = build.graph.node("Sub", x, x), build.own_vector(norm)
        epsilon = build.spec.norm_epsilon
        normed, _ = add_rms_norm(build.graph, x, nothing, weight, epsilon=epsilon)
        return normed

    def contribute(self, product: str, after: AfterProduct) -> None:
        """A part's product is to be added to the hidden state, once it is summed over shards."""
        if not self._build.layout.is_split:
            self.contribute_whole(product, after)
            return
        self._build.hidden_output(self._hidden, "hidden_out")
        self._build.hidden_output(product, "partial_out", parts=after.parts)
        self._cut("partial", after=after)

    def contribute_whole(self, product: str, after: AfterProduct) -> None:
        """The same of what every shard computes for itself."""
        self._addend, self._after = product, after
        self._addend, self._scale = self._take(), after.scale
        self._multiply()

    def contribute_nothing(self, after: AfterProduct) -> None:
        """The same of a part that the shard has no units of."""
        self._add(stays=True)
        self._build.hidden_output(self._hidden, "hidden_out")
        self._cut("partial", partial_is_zero=True, after=after)

    def carry_over(self) -> None:
        """Cut inside a stage that is not split. The next graph adds, as it would have without."""
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
        """Cut inside a part of a streamed layer; the next graph has these values [batch, tokens,
        hidden] of the part, and the hidden state. `done`: what the graph is of its layer; the first
        of the values is what the experts are given."""
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
        """Close the graph; the next one starts from what this one put out."""
        parts = max(parts, after.parts)
        self._build.cut(reduce, partial_is_zero=partial_is_zero, experts=experts, parts=parts)
        self._kept = {}
        self._hidden = self._build.hidden_input("hidden")
        self._addend = None
        if reduce == "partial":
            self._addend = self._build.hidden_input("partial", parts=parts)
        self._after, self._scale = after, after.scale

    def _add_nothing(self) -> None:
        """The next norm then is the kernel that adds as well."""
        self._addend = self._nothing = self._build.graph.node("Sub", self._hidden, self._hidden)

    def _multiply(self, *, stays: bool = False) -> None:
        """Make the hidden state what a scaled layer gives, as if a stage began after it."""
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
        """What is to be added to the hidden state, as it is added."""
        addend, after = self._addend, self._after
        self._addend, self._after = None, NOTHING_AFTER
        if addend is None:
            return None
        return normed_product(self._build, addend, after, stays=stays)
