"""Queries, keys and values of latent attention (MLA), from vectors that all heads share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.backends.triton.blocks import LayerBuilder
from edge.backends.triton.weights import Product
from edge.kernels.latent_heads.triton import latent_heads
from edge.kernels.rms_norm.triton import rms_norm
from edge.models.attention import Attention
from edge.models.latent_attention import Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProduct:
    """Takes the place of the single product of other attention."""

    part: Attention
    latent: Latent
    shared: Product
    """The product that gives both latent vectors, and the part that all keys share."""
    query: Product
    key_value: Product
    query_norm: Tensor | None
    key_value_norm: Tensor

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, part: Attention, latent: Latent) -> LatentProduct:
        p = f"layers.{layer}."
        has_own = latent.query_rank is not None
        return cls(
            part=part,
            latent=latent,
            shared=build.product(f"{p}latent"),
            query=build.product(f"{p}query"),
            key_value=build.product(f"{p}key_value"),
            query_norm=build.vector(f"{p}query_latent_norm") if has_own else None,
            key_value_norm=build.vector(f"{p}kv_latent_norm"),
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return self.shared, self.query, self.key_value

    def __call__(self, normed: Tensor) -> Tensor:
        """[rows, 3 · num_heads · head_size], with values padded with zeros."""
        whole, rank = self.shared(normed), self.latent.query_rank or 0
        of_query = normed
        if self.query_norm is not None:
            of_query = self._normed(whole[:, :rank], self.query_norm)
        query = self.query(of_query)
        made_of = self._normed(whole[:, rank : rank + self.latent.rank], self.key_value_norm)
        columns = query.shape[1]
        packed = torch.empty(len(query), 3 * columns, dtype=query.dtype, device=query.device)
        packed[:, :columns] = query
        self.heads(
            self.key_value(made_of), whole[:, rank + self.latent.rank :], packed[:, columns:]
        )
        return packed

    def heads(self, product: Tensor, shared: Tensor, out: Tensor | None = None) -> Tensor:
        own = self.part.head_size - self.latent.shared_size
        return latent_heads(product, shared, num_heads=self.part.num_heads, own_size=own, out=out)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.contiguous(), weight, epsilon=self.latent.norm_epsilon)
