"""A short convolution on a GPU: the product, the convolution over its state, the product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.request_states import RequestStates
from edge.backends.triton.weights import Product
from edge.kernels.short_convolution.triton import short_convolution
from edge.models.short_convolution import ShortConvolution


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionBlock:
    """The short convolution of one layer. See Block."""

    layer: int
    norm: Norm | Cast
    mixed: Product
    weights: Tensor
    bias: Tensor | None
    output: Product
    states: RequestStates

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, part: ShortConvolution) -> ShortConvolutionBlock:
        p = f"layers.{layer}."
        return cls(
            layer=layer,
            norm=build.norm(f"{p}attention_norm"),
            mixed=build.product(f"{p}short"),
            weights=build.vector(f"{p}short_convolution").view(-1, part.convolution),
            bias=build.vector(f"{p}short_convolution_bias") if part.bias else None,
            output=build.product(f"{p}short_output"),
            states=build.cache.states_of_layers,
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        self.output(self.convolve(self.mixed(normed), lane), lane.partial)

    def convolve(self, mixed: Tensor, lane: Lane) -> Tensor:
        """Returns [rows, channels], and updates the states of the step's requests."""
        (states,) = self.states.layers[self.layer]
        return short_convolution(
            mixed,
            states,
            self.weights,
            bias=self.bias,
            slots=self.states.slots[: lane.batch],
            sequences=lane.sequences,
            starts=lane.starts,
            max_tokens=lane.num_tokens,
        )
