"""What a shard computes between two sums, as launches of Triton kernels.

The residual stream is float32, as it travels between peers. Products are given `activations`: a
norm rounds to it on its way, and results go back to float32. What a product adds to the stream is
left in `partial`, and the next norm adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.buffers import Lane
from edge.backends.triton.device import Device
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.streaming import StreamedLayers
from edge.backends.triton.tuning import AttentionShape, Tuning, open_tuning
from edge.backends.triton.weights import Product, Weight, read_weight, to_device
from edge.models.spec import ModelSpec
from edge.weights.layout import ShardLayout
from kernels.attention.triton import attention
from kernels.embedding.triton import embedding
from kernels.gated_mlp.triton import gated
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from kernels.rope.reference import rope_tables
from kernels.rope.triton import rope_store

Reduced = Literal["hidden", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Launches up to a sum over the stage's shards, or to the end of the stage."""

    layer: int | None = None
    """Whose weights it takes."""
    launch: Callable[[Lane], None]
    reduce: Reduced | None
    """Which rows of the lane are summed then."""
    is_embedding: bool = False
    """Nothing to do where the host has looked up the rows."""
    is_head: bool = False
    """Nothing to do for a lane that wants no logits."""


class Norm:
    """RMSNorm of the residual stream, for products to come."""

    def __init__(self, weight: Tensor, epsilon: float, activations: torch.dtype) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._activations = activations

    def __call__(self, hidden: Tensor, addend: Tensor | None) -> Tensor:
        """With an addend, that is added to `hidden` in place first."""
        out = torch.empty(hidden.shape, dtype=self._activations, device=hidden.device)
        if addend is None:
            return rms_norm(hidden, self._weight, epsilon=self._epsilon, out=out)
        add_rms_norm(hidden, addend, self._weight, epsilon=self._epsilon, out=out, total=hidden)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention half of one layer."""

    layer: int
    norm: Norm
    qkv: Product
    output: Product
    norms: tuple[Tensor, Tensor] | None
    """Of queries and keys."""
    window: int | None
    epsilon: float
    tuning: Tuning

    def attend(
        self, qkv: Tensor, lane: Lane, cache: BlockCache, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Rotate, keep keys and values, attend: [rows, heads · head_size]."""
        layer = cache.layers[self.layer]
        query = rope_store(
            qkv,
            layer,
            *tables,
            positions=lane.positions,
            sequences=lane.sequences,
            norms=self.norms,
            epsilon=self.epsilon,
        )
        shape = AttentionShape(
            bits=layer.bits,
            queries=lane.num_tokens,
            group=query.shape[1] // layer.num_kv_heads,
            head_size=query.shape[2],
        )
        mixed = attention(
            query,
            layer,
            starts=lane.starts,
            lengths=lane.lengths,
            max_queries=lane.num_tokens,
            max_keys=lane.max_keys,
            window=self.window,
            tiles=self.tuning.attention(shape),
        )
        return mixed.view(mixed.shape[0], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The other half."""

    norm: Norm
    gate_up: Product
    down: Product

    def gate(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    norm: Norm
    product: Product


class ShardOperators:
    """The shard's weights on the device, and what is computed with them."""

    def __init__(
        self,
        spec: ModelSpec,
        arrays: ShardArrays,
        device: Device,
        cache: BlockCache,
        *,
        context_tokens: int,
        activations: torch.dtype,
        streamed: StreamedLayers | None = None,
    ) -> None:
        """streamed: where the matrices of layers are, if not where they stay."""
        self.spec = spec
        self.layout: ShardLayout = arrays.layout
        self.activations = activations
        self.cache = cache
        self._arrays = arrays
        self._device = device
        self._tuning = open_tuning(device, activations)
        self.half_scales = activations != torch.float32
        self._products: list[Product] = []
        self._streamed = streamed
        frequencies = np.asarray(spec.inverse_frequencies, dtype=np.float32)
        cos, sin = rope_tables(frequencies, length=context_tokens)
        self.tables = to_device(cos, device), to_device(sin, device)
        layout = self.layout
        self.embedding: Tensor | None = None
        if layout.embedding and streamed is None:
            self.embedding = to_device(arrays.read("embedding"), device)
        layers = tuple(layout.layers)
        self.attentions = {n: self._attention(n) for n in layers if layout.num_heads}
        self.feed_forwards = {n: self._feed_forward(n) for n in layers if layout.ffn_columns}
        self.head: Head | None = None
        if layout.is_last_stage and layout.vocab:
            self.head = Head(
                norm=self._norm("final_norm"), product=self._product("head", self._read("head"))
            )

    def let_go(self) -> None:
        """Of what a shard that streams has elsewhere: its layers' matrices, and its embedding."""
        self.embedding = None
        for product in self._products:
            product.place(None)

    def place(self, streamed: StreamedLayers | None) -> None:
        """Take the layers' matrices from there; None: in memory of their own, read again."""
        self._streamed = streamed
        for product in self._products:
            product.place(self._layer_weight(product.name))
        if streamed is None and self.layout.embedding:
            self.embedding = to_device(self._arrays.read("embedding"), self._device)

    def segments(self) -> tuple[Segment, ...]:
        """In order; a stage of several shards has a sum after each but the last one."""
        layout = self.layout
        found: list[Segment] = []

        def add(launch: Callable[[Lane], None], reduce: Reduced, layer: int | None = None) -> None:
            summed = reduce if layout.is_split else None
            found.append(Segment(launch=launch, reduce=summed, layer=layer))

        if layout.is_first_stage:
            summed: Reduced | None = "hidden" if layout.is_split else None
            found.append(Segment(launch=self.embed, reduce=summed, is_embedding=True))
        for layer in layout.layers:
            pending = layer > layout.layers.start
            add(self._attention_launch(layer, pending=pending), "partial", layer)
            add(self._feed_forward_launch(layer), "partial", layer)
        if not layout.is_last_stage:
            found.append(Segment(launch=_hand_over, reduce=None))
        elif self.head is not None:
            head = self.head
            found.append(Segment(launch=lambda lane: _head(head, lane), reduce=None, is_head=True))
        return tuple(found)

    def embed(self, lane: Lane) -> None:
        if self.embedding is None:
            lane.hidden.zero_()
            return
        first = self.layout.embedding.start
        embedding(lane.tokens, self.embedding, first_id=first, out=lane.hidden)

    def _attention_launch(self, layer: int, *, pending: bool) -> Callable[[Lane], None]:
        """pending: a product is yet to be added to the residual stream."""
        if layer not in self.attentions:
            return lambda lane: _contribute_nothing(lane, pending=pending)
        this = self.attentions[layer]

        def launch(lane: Lane) -> None:
            normed = this.norm(lane.hidden, lane.partial if pending else None)
            mixed = this.attend(this.qkv(normed), lane, self.cache, self.tables)
            this.output(mixed, lane.partial)

        return launch

    def _feed_forward_launch(self, layer: int) -> Callable[[Lane], None]:
        if layer not in self.feed_forwards:
            return lambda lane: _contribute_nothing(lane, pending=True)
        this = self.feed_forwards[layer]

        def launch(lane: Lane) -> None:
            normed = this.norm(lane.hidden, lane.partial)
            this.down(this.gate(this.gate_up(normed)), lane.partial)

        return launch

    def _attention(self, layer: int) -> Attention:
        p = f"layers.{layer}."
        norms = None
        if self.spec.query_key_norm:
            norms = self._vector(f"{p}query_norm"), self._vector(f"{p}key_norm")
        return Attention(
            layer=layer,
            norm=self._norm(f"{p}attention_norm"),
            qkv=self._layer_product(f"{p}qkv"),
            output=self._layer_product(f"{p}output"),
            norms=norms,
            window=self.spec.windows[layer],
            epsilon=self.spec.norm_epsilon,
            tuning=self._tuning,
        )

    def _feed_forward(self, layer: int) -> FeedForward:
        p = f"layers.{layer}."
        return FeedForward(
            norm=self._norm(f"{p}mlp_norm"),
            gate_up=self._layer_product(f"{p}gate_up"),
            down=self._layer_product(f"{p}down"),
        )

    def _layer_product(self, name: str) -> Product:
        product = self._product(name, self._layer_weight(name))
        self._products.append(product)
        return product

    def _layer_weight(self, name: str) -> Weight:
        return self._read(name) if self._streamed is None else self._streamed.weight(name)

    def _read(self, name: str) -> Weight:
        return read_weight(self._arrays, name, self._device, half_scales=self.half_scales)

    def _product(self, name: str, weight: Weight) -> Product:
        return Product(self._arrays, name, weight, self._device, self._tuning)

    def _norm(self, name: str) -> Norm:
        return Norm(self._vector(name), self.spec.norm_epsilon, self.activations)

    def _vector(self, name: str) -> Tensor:
        return to_device(self._arrays.read(name), self._device)


def _contribute_nothing(lane: Lane, *, pending: bool) -> None:
    if pending:
        lane.hidden.add_(lane.partial)
    lane.partial.zero_()


def _hand_over(lane: Lane) -> None:
    """The whole hidden state, for the next stage."""
    lane.hidden.add_(lane.partial)


def _head(head: Head, lane: Lane) -> None:
    rows = lane.last_rows
    head.product(head.norm(lane.hidden[rows], lane.partial[rows]), lane.logits)
