"""A shard's work between two sums, as launches of Triton kernels.

The residual stream is float32, as between peers. Inputs of products have the type `activations`, to
which norms round; results are float32 again. A product's result stays in `partial` until the next
norm adds it to the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.attention import AttentionBlock
from edge.backends.triton.blocks import Addend, Block, Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.device import Device
from edge.backends.triton.expert_products import ExpertProducts
from edge.backends.triton.experts import ExpertsBlock
from edge.backends.triton.gated_mlp import GatedMlpBlock
from edge.backends.triton.linear_attention import LinearAttentionBlock
from edge.backends.triton.observation import Grams
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.plain_mlp import PlainMlpBlock
from edge.backends.triton.short_convolution import ShortConvolutionBlock
from edge.backends.triton.side_inputs import SideInputs
from edge.backends.triton.streaming import StreamedLayers
from edge.backends.triton.token_inputs import TokenInputs
from edge.backends.triton.tuning import open_tuning
from edge.backends.triton.weights import Product, read_weight, to_device
from edge.kernels.embedding.triton import embedding
from edge.kernels.logits.triton import finish_logits
from edge.kernels.matmul_nbits.triton import Weight
from edge.models.rotary import Rotary
from edge.models.spec import ModelSpec
from edge.weights.layout import ShardLayout
from edge.weights.recipe import StoredMatrix

Reduced = Literal["hidden", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSegment:
    """Launches up to the next sum over the stage's shards, or to the end of the stage."""

    layer: int | None = None
    """The layer whose weights it uses."""
    launch: Callable[[Lane], None]
    reduce: Reduced | None
    """The rows of the lane that are summed after it."""
    is_embedding: bool = False
    """Whether it is the embedding, which is skipped if the host has looked up the rows."""
    is_head: bool = False
    """Whether it is the head, which is skipped for a lane without logits."""


_BLOCKS: Mapping[str, Callable[[LayerBuilder, int, Any], Block]] = {
    "attention": AttentionBlock.of,
    "experts": ExpertsBlock.of,
    "gated_mlp": GatedMlpBlock.of,
    "linear_attention": LinearAttentionBlock.of,
    "plain_mlp": PlainMlpBlock.of,
    "short_convolution": ShortConvolutionBlock.of,
}
"""Makers of blocks by kind of part; `PART_KINDS` in `backend.py` names the same kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    norm: Norm | Cast
    product: Product


class ShardOperators:
    """The shard's weights on the device, and its launches."""

    def __init__(
        self,
        spec: ModelSpec,
        arrays: ShardArrays,
        device: Device,
        cache: BlockCache,
        side: SideInputs,
        *,
        context_tokens: int,
        activations: torch.dtype,
        streamed: StreamedLayers | None = None,
        observes: bool = False,
    ) -> None:
        """streamed: the source of layers' matrices, if they move. observes: sum over the inputs of
        products."""
        self.spec = spec
        self.layout: ShardLayout = arrays.layout
        self.activations = activations
        self.cache = cache
        self.side = side
        self._arrays = arrays
        self._device = device
        self._tuning = open_tuning(device, activations)
        self._is_half = activations != torch.float32
        self._products: list[Product | ExpertProducts] = []
        self._streamed = streamed
        layout = self.layout
        self.grams = Grams(layout, device) if observes else None
        self.embedding: Tensor | None = None
        """The embedding; None if the host looks up its rows, as for streamed shards, learned
        positions and per-layer token inputs."""
        if streamed is None:
            self._place_embedding()
        build = LayerBuilder(
            spec=spec,
            arrays=arrays,
            device=device,
            cache=cache,
            side=side,
            tuning=self._tuning,
            activations=activations,
            tables={
                mixer.rotary: _tables(mixer.rotary, context_tokens, device)
                for mixer in layout.attentions.values()
            },
            product=self._layer_product,
            experts=self._layer_experts,
        )
        self.blocks = {layer: _blocks(build, layer) for layer in layout.layers}
        """The mixer and the feed-forward block of each layer; None if the shard lacks it."""
        scale = "" if spec.token_inputs else "layer_scale"
        self.addends = {
            layer: (
                build.addend(f"layers.{layer}.attention_post_norm"),
                build.addend(f"layers.{layer}.mlp_post_norm", f"layers.{layer}.{scale}"),
            )
            for layer in layout.layers
        }
        """The addends made of those blocks' products."""
        self.token_inputs = {
            layer: TokenInputs.of(build, layer, spec.layer(layer).feed_forward.activation)
            for layer in layout.layers
            if spec.token_inputs
        }
        """Token inputs added after those blocks, on every shard."""
        self.token_addends = {
            layer: build.addend(f"layers.{layer}.token_post_norm", f"layers.{layer}.layer_scale")
            for layer in self.token_inputs
        }
        self.head: Head | None = None
        if layout.is_last_stage and layout.vocab:
            self.head = Head(
                norm=build.norm("final_norm"), product=self._product("head", self._read)
            )

    def let_go(self) -> None:
        """Release the layers' matrices and the embedding, which a streaming shard has elsewhere."""
        self.embedding = None
        for product in self._products:
            product.place(None)

    def place(self, streamed: StreamedLayers | None) -> None:
        """Take the layers' matrices from `streamed`; None: read them into own memory."""
        self._streamed = streamed
        for product in self._products:
            product.place(self._layer_weight)
        if streamed is None:
            self._place_embedding()

    def _place_embedding(self) -> None:
        by_host = "positions" in self._arrays or self.layout.token_columns
        if self.layout.embedding and not by_host:
            self.embedding = to_device(self._arrays.read("embedding"), self._device)

    def segments(self) -> tuple[LaunchSegment, ...]:
        """The segments in order. In a split stage a sum follows each but the last one."""
        layout = self.layout
        found: list[LaunchSegment] = []

        def summed(what: Reduced) -> Reduced | None:
            return what if layout.is_split else None

        if layout.is_first_stage:
            reduce = summed("hidden") if layout.sums_embedding else None
            found.append(LaunchSegment(launch=self.embed, reduce=reduce, is_embedding=True))
        pending: Addend | None = None
        for layer, blocks in self.blocks.items():
            keeps = layer if self.side.keeps(layer) else None
            for block, addend in zip(blocks, self.addends[layer], strict=True):
                launch = self._launch(block, pending=pending, keeps=keeps)
                keeps = None  # only the mixer's input is kept
                found.append(LaunchSegment(launch=launch, reduce=summed("partial"), layer=layer))
                pending = addend
            if layer in self.token_inputs:
                launch = self._launch_token_inputs(layer, pending=pending)
                found.append(LaunchSegment(launch=launch, reduce=None, layer=layer))
                pending = self.token_addends[layer]
        last = pending  # None in a stage without layers
        if not layout.is_last_stage:
            found.append(LaunchSegment(launch=lambda lane: _hand_over(last, lane), reduce=None))
        elif self.head is not None:
            head = self.head
            if self.grams is not None:  # observe every token, with logits or without
                found.append(
                    LaunchSegment(launch=lambda lane: self._observe(head, last, lane), reduce=None)
                )
            found.append(
                LaunchSegment(
                    launch=lambda lane: self._head(head, last, lane), reduce=None, is_head=True
                )
            )
        return tuple(found)

    def _launch(
        self, block: Block | None, *, pending: Addend | None, keeps: int | None
    ) -> Callable[[Lane], None]:
        """The launches of a block. pending: the addend before it. keeps: the layer, if later layers
        need its input."""

        def launch(lane: Lane) -> None:
            normed = None
            if block is None:
                _hand_over(pending, lane)
                lane.partial.zero_()
            else:
                added = None if pending is None else pending.settle(lane, lane.hidden)
                normed = block.norm(lane.hidden, added)
            if keeps is not None:
                self.side.kept(keeps, lane).copy_(lane.hidden)
            if block is not None and normed is not None:
                block.launch(normed, lane)

        return launch

    def _launch_token_inputs(self, layer: int, *, pending: Addend | None) -> Callable[[Lane], None]:
        inputs = self.token_inputs[layer]

        def launch(lane: Lane) -> None:
            _hand_over(pending, lane)
            inputs.launch(lane)

        return launch

    def embed(self, lane: Lane) -> None:
        if self.embedding is None:
            lane.hidden.zero_()
            return
        first = self.layout.embedding.start
        embedding(lane.tokens, self.embedding, first_id=first, out=lane.hidden)
        if self.spec.embedding_scale != 1.0:
            lane.hidden.mul_(self.spec.embedding_scale)

    def _observe(self, head: Head, addend: Addend | None, lane: Lane) -> None:
        assert self.grams is not None
        hidden = lane.hidden.clone()
        added = None if addend is None else addend.settle(lane, hidden)
        self.grams.add(head.product.name, head.norm(hidden, added))

    def _head(self, head: Head, addend: Addend | None, lane: Lane) -> None:
        rows, spec = lane.last_rows, self.spec
        added = None if addend is None else addend.settle(lane, lane.hidden)
        normed = head.norm(lane.hidden[rows], None if added is None else added[rows])
        if lane.states:
            lane.hidden[rows].copy_(normed)
            return
        head.product(normed, lane.logits)
        finish_logits(lane.logits, scale=spec.logit_scale, soft_cap=spec.logit_soft_cap)

    def _layer_product(self, name: str) -> Product:
        product = self._product(name, self._layer_weight)
        product.grams = self.grams
        self._products.append(product)
        return product

    def _layer_experts(self, names: Sequence[str], biases: Tensor | None) -> ExpertProducts:
        product = ExpertProducts(self._arrays, names, self._layer_weight, biases, self._tuning)
        self._products.append(product)
        return product

    def _layer_weight(self, matrix: StoredMatrix) -> Weight:
        return self._read(matrix) if self._streamed is None else self._streamed.weight(matrix)

    def _read(self, matrix: StoredMatrix) -> Weight:
        return read_weight(self._arrays, matrix, self._device, is_half=self._is_half)

    def _product(self, name: str, weight: Callable[[StoredMatrix], Weight]) -> Product:
        return Product(self._arrays, name, weight, self._device, self._tuning)


def _blocks(build: LayerBuilder, layer: int) -> tuple[Block | None, Block | None]:
    local = build.arrays.layout.layer(layer)
    mixer, feed_forward = (
        None if part is None else _BLOCKS[part.kind](build, layer, part)
        for part in (local.mixer, local.feed_forward)
    )
    return mixer, feed_forward


def _tables(rotary: Rotary, context_tokens: int, device: Device) -> tuple[Tensor, Tensor]:
    cos, sin = rotary.tables(context_tokens)
    return to_device(cos, device), to_device(sin, device)


def _hand_over(addend: Addend | None, lane: Lane) -> None:
    """Complete the hidden state with the addend."""
    added = None if addend is None else addend.settle(lane, lane.hidden)
    if added is not None:
        lane.hidden.add_(added)
