"""Latent attention (MLA) on a GPU: rows that all heads share, and products of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.expert_products import ExpertProducts
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.weights import Product
from edge.kernels.latent_attention.triton import latent_attention, store_rows
from edge.kernels.rms_norm.triton import rms_norm
from edge.models.attention import Attention
from edge.models.latent_attention import Latent, of_head


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionBlock:
    """The latent attention of one layer. See Block.

    Each use of a head is a row with a matrix of its own, as with experts.
    """

    layer: int
    part: Attention
    latent: Latent
    norm: Norm | Cast
    shared: Product
    """The product that gives both latent vectors, and the part of rows that turns."""
    query: Product
    keys: ExpertProducts
    values: ExpertProducts
    output: Product
    query_norm: Tensor | None
    row_norm: Tensor
    tables: tuple[Tensor, Tensor]
    cache: BlockCache

    @classmethod
    def of(
        cls, build: LayerBuilder, layer: int, part: Attention, latent: Latent
    ) -> LatentAttentionBlock:
        p, heads = f"layers.{layer}.", range(part.num_heads)
        has_own = latent.query_rank is not None
        return cls(
            layer=layer,
            part=part,
            latent=latent,
            norm=build.norm(f"{p}attention_norm"),
            shared=build.product(f"{p}latent"),
            query=build.product(f"{p}query"),
            keys=build.experts([of_head(p, "keys", head) for head in heads], None),
            values=build.experts([of_head(p, "values", head) for head in heads], None),
            output=build.product(f"{p}output"),
            query_norm=build.vector(f"{p}query_latent_norm") if has_own else None,
            row_norm=build.vector(f"{p}kv_latent_norm"),
            tables=build.tables[part.rotary],
            cache=build.cache,
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        latent, heads = self.latent, self.part.num_heads
        whole, rank = self.shared(normed), latent.query_rank or 0
        of_query = normed
        if self.query_norm is not None:
            of_query = self._normed(whole[:, :rank], self.query_norm)
        query = self.query(of_query)
        made_of = self._normed(whole[:, rank : rank + latent.rank], self.row_norm)
        if self.shared.grams is not None:
            self.shared.grams.add(self.values.names[0], made_of)
        own = query.view(len(query), heads, -1)[..., latent.shared_size :]
        absorbed = self._of_heads(self.keys, own)
        mixed = self.attend(absorbed, query, made_of, whole[:, rank + latent.rank :], lane)
        values = self._of_heads(self.values, mixed[..., : latent.rank])
        self.output(values.view(len(values), -1), lane.partial)

    def attend(
        self, absorbed: Tensor, query: Tensor, made_of: Tensor, shared: Tensor, lane: Lane
    ) -> Tensor:
        """Store rows, attend to all: mixed rows [tokens, num_heads, 2 · half]."""
        cache = self.cache.layers[self.layer]
        queries = store_rows(
            absorbed, query, made_of, shared, cache, *self.tables,
            positions=lane.positions, sequences=lane.sequences,
            interleaved=self.part.rotary.is_interleaved,
        )  # fmt: skip
        return latent_attention(
            queries, cache,
            starts=lane.starts, lengths=lane.lengths, max_queries=lane.num_tokens,
            max_keys=lane.max_keys, form=self.part.latent_form,
        )  # fmt: skip

    def _of_heads(self, products: ExpertProducts, x: Tensor) -> Tensor:
        """x [rows, num_heads, columns] → [rows, num_heads, outputs]."""
        rows, heads, columns = x.shape
        chosen = torch.arange(heads, dtype=torch.int32, device=x.device).repeat(rows, 1)
        uses = products.sort(chosen, element_bytes=x.element_size())
        found = products(x.reshape(rows * heads, columns).contiguous(), chosen, uses)
        return found.view(rows, heads, -1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.contiguous(), weight, epsilon=self.latent.norm_epsilon)
