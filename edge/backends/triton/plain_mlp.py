"""A feed-forward block without a gate on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.weights import Product
from edge.kernels.activation.triton import activated
from edge.models.plain_mlp import PlainMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlpBlock:
    """The feed-forward block of one layer. See Block."""

    part: PlainMlp
    norm: Norm | Cast
    up: Product
    down: Product

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, part: PlainMlp) -> PlainMlpBlock:
        p = f"layers.{layer}."
        return cls(
            part=part,
            norm=build.norm(f"{p}mlp_norm"),
            up=build.product(f"{p}up"),
            down=build.product(f"{p}down"),
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        up = self.up(normed)
        self.down(self.activate(up, out=up), lane.partial)

    def activate(self, up: Tensor, out: Tensor | None = None) -> Tensor:
        return activated(up, activation=self.part.activation, out=out)
