"""Attention on a GPU: the product, rotation into the paged KV cache, attention, the product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edge.backends.triton.blocks import Norm, Shop
from edge.backends.triton.buffers import Lane
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.tuning import AttentionShape, Tuning
from edge.backends.triton.weights import Product
from edge.models.attention import Attention
from kernels.attention.triton import attention
from kernels.rope.triton import rope_store


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """The attention of one layer. See Block."""

    layer: int
    part: Attention
    norm: Norm
    qkv: Product
    output: Product
    norms: tuple[Tensor, Tensor] | None
    """The norms of queries and keys."""
    tables: tuple[Tensor, Tensor]
    cache: BlockCache
    epsilon: float
    tuning: Tuning

    @classmethod
    def of(cls, shop: Shop, layer: int, part: Attention) -> AttentionBlock:
        p = f"layers.{layer}."
        norms = None
        if part.query_key_norm:
            norms = shop.vector(f"{p}query_norm"), shop.vector(f"{p}key_norm")
        return cls(
            layer=layer,
            part=part,
            norm=shop.norm(f"{p}attention_norm"),
            qkv=shop.product(f"{p}qkv"),
            output=shop.product(f"{p}output"),
            norms=norms,
            tables=shop.tables[part.inverse_frequencies],
            cache=shop.cache,
            epsilon=shop.spec.norm_epsilon,
            tuning=shop.tuning,
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        self.output(self.attend(self.qkv(normed), lane), lane.partial)

    def attend(self, qkv: Tensor, lane: Lane) -> Tensor:
        """Rotate, keep keys and values, attend: [rows, heads · head_size]."""
        layer = self.cache.layers[self.layer]
        query = rope_store(
            qkv,
            layer,
            *self.tables,
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
            window=self.part.window,
            tiles=self.tuning.attention(shape),
        )
        return mixed.view(mixed.shape[0], -1)
