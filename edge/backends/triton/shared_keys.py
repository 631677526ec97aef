"""Queries of a layer, with keys and values made from the input of an earlier layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.side_inputs import SideInputs
from edge.backends.triton.weights import Product


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeysProduct:
    """Takes the place of the single product of other attention."""

    keys_of: int
    query: Product
    key_value: Product
    norm: Norm | Cast
    """Norm of the earlier layer's input."""
    side: SideInputs

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, keys_of: int) -> SharedKeysProduct:
        p = f"layers.{layer}."
        return cls(
            keys_of=keys_of,
            query=build.product(f"{p}query"),
            key_value=build.product(f"{p}key_value"),
            norm=build.norm(f"{p}keys_norm"),
            side=build.side,
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return self.query, self.key_value

    def __call__(self, normed: Tensor, lane: Lane) -> Tensor:
        """[rows, queries, then keys, then values]"""
        given = self.norm(self.side.kept(self.keys_of, lane), None)
        return torch.cat((self.query(normed), self.key_value(given)), dim=1)
