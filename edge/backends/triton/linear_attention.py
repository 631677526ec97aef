"""Linear attention on a GPU: two products, the delta rule over its states, the product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.request_states import RequestStates
from edge.backends.triton.weights import Product
from edge.kernels.linear_attention.triton import linear_attention
from edge.models.linear_attention import LinearAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionBlock:
    """The linear attention of one layer. See Block."""

    layer: int
    part: LinearAttention
    norm: Norm | Cast
    mixed: Product
    gates: Product
    convolution: Tensor
    decay_bias: Tensor
    decay_rate: Tensor
    scale: Tensor
    output: Product
    states: RequestStates
    epsilon: float

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, part: LinearAttention) -> LinearAttentionBlock:
        p = f"layers.{layer}."
        return cls(
            layer=layer,
            part=part,
            norm=build.norm(f"{p}attention_norm"),
            mixed=build.product(f"{p}linear"),
            gates=build.product(f"{p}linear_gates"),
            convolution=build.vector(f"{p}linear_convolution").view(-1, part.convolution),
            decay_bias=build.vector(f"{p}linear_decay_bias"),
            decay_rate=build.vector(f"{p}linear_decay_rate"),
            scale=build.vector(f"{p}linear_scale"),
            output=build.product(f"{p}linear_output"),
            states=build.cache.states_of_layers,
            epsilon=build.spec.norm_epsilon,
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        # Gates are not rounded, because states decay by their exponential.
        count = 2 * self.part.num_value_heads
        gates = torch.empty(normed.shape[0], count, dtype=torch.float32, device=normed.device)
        self.gates(normed, gates)
        self.output(self.attend(self.mixed(normed), gates, lane), lane.partial)

    def attend(self, mixed: Tensor, gates: Tensor, lane: Lane) -> Tensor:
        """Returns [rows, values], and updates the states of the step's requests."""
        channels, heads = self.states.layers[self.layer]
        return linear_attention(
            mixed,
            gates,
            (channels, heads),
            convolution=self.convolution,
            decay_bias=self.decay_bias,
            decay_rate=self.decay_rate,
            scale=self.scale,
            key_heads=self.part.num_key_heads,
            epsilon=self.epsilon,
            slots=self.states.slots[: lane.batch],
            sequences=lane.sequences,
            starts=lane.starts,
            max_tokens=lane.num_tokens,
        )
