"""A gated feed-forward block on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.weights import Product
from edge.kernels.gated_mlp.triton import gated
from edge.models.gated_mlp import GatedMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpBlock:
    """The feed-forward block of one layer. See Block."""

    part: GatedMlp
    norm: Norm | Cast
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, part: GatedMlp) -> GatedMlpBlock:
        p = f"layers.{layer}."
        return cls(
            part=part,
            norm=build.norm(f"{p}mlp_norm"),
            gate_up=build.product(f"{p}gate_up"),
            down=build.product(f"{p}down"),
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        self.down(self.gate(self.gate_up(normed)), lane.partial)

    def gate(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, activation=self.part.activation)
