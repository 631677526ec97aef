"""The step after a feed-forward block on a GPU, in layers with inputs of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.backends.triton.blocks import LayerBuilder
from edge.backends.triton.buffers import Lane
from edge.backends.triton.side_inputs import SideInputs
from edge.backends.triton.weights import Product
from edge.kernels.activation.reference import Activation
from edge.kernels.activation.triton import activated
from edge.kernels.token_inputs.triton import token_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Token inputs of one layer. Every shard of a stage computes all of them, without sums."""

    layer: int
    activation: Activation
    gate: Product
    projection: Product
    output: Product
    norm: Tensor
    side: SideInputs
    activations: torch.dtype
    hidden_size: int
    epsilon: float

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, activation: Activation) -> TokenInputs:
        p = f"layers.{layer}."
        return cls(
            layer=layer,
            activation=activation,
            gate=build.product(f"{p}token_gate"),
            projection=build.product(f"{p}token_projection"),
            output=build.product(f"{p}token_output"),
            norm=build.vector(f"{p}token_norm"),
            side=build.side,
            activations=build.activations,
            hidden_size=build.spec.hidden_size,
            epsilon=build.spec.norm_epsilon,
        )

    def launch(self, lane: Lane) -> None:
        """Compute the addend from the complete hidden state."""
        made = self.projection(self.side.embedded(lane).to(self.activations))
        inputs = self.inputs(made, self.side.token_rows(self.layer, lane))
        gate = self.gate(lane.hidden.to(self.activations))
        self.output(activated(gate, activation=self.activation).mul_(inputs), lane.partial)

    def inputs(self, made: Tensor, rows: Tensor) -> Tensor:
        return token_inputs(
            made, rows, self.norm, hidden_size=self.hidden_size, epsilon=self.epsilon
        )
