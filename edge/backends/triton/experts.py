"""A router and its experts on a GPU, and a shared one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge.backends.triton.blocks import Cast, LayerBuilder, Norm
from edge.backends.triton.buffers import Lane
from edge.backends.triton.expert_products import ExpertProducts
from edge.backends.triton.weights import Product
from edge.kernels.experts.triton import mix, own, route
from edge.kernels.gated_mlp.triton import gated
from edge.models.experts import Experts, expert_name, shared_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBlock:
    """The experts of one layer. See Block."""

    layer: int
    part: Experts
    norm: Norm | Cast
    router: Product
    correction: Tensor | None
    gate_up: ExpertProducts
    down: ExpertProducts
    shared: tuple[Product, Product] | None
    """The products gate-and-up and down of the shared expert."""

    @classmethod
    def of(cls, build: LayerBuilder, layer: int, part: Experts) -> ExpertsBlock:
        p = f"layers.{layer}."

        def products(name: str) -> ExpertProducts:
            names = [f"{expert_name(p, number)}{name}" for number in part.held]
            biases = f"{p}experts_{name}_bias"
            if biases not in build.arrays:
                return build.experts(names, None)
            return build.experts(names, build.vector(biases).view(len(part.held), -1))

        shared = None
        if part.shared is not None:
            own = shared_name(p)
            shared = build.product(f"{own}gate_up"), build.product(f"{own}down")
        return cls(
            layer=layer,
            part=part,
            norm=build.norm(f"{p}mlp_norm"),
            router=build.product(f"{p}router"),
            correction=build.vector(f"{p}router_correction") if part.has_correction else None,
            gate_up=products("gate_up"),
            down=products("down"),
            shared=shared,
        )

    def launch(self, normed: Tensor, lane: Lane) -> None:
        # In float32, as its weights, because small differences decide the choice.
        logits = self.router(normed.float())
        chosen, weights = self.choose(logits)
        if self.router.grams is not None:
            self.router.grams.count(self.layer, chosen)
        chosen = own(chosen, self.part.held)
        sorted_uses = self.gate_up.sort(chosen, element_bytes=normed.element_size())
        is_part = self.part.is_part
        active = self.gate(self.gate_up(normed, chosen, sorted_uses, is_part=is_part))
        results = self.down(active, chosen, sorted_uses, is_part=is_part, dtype=torch.float32)
        given = gate = None
        if self.shared is not None and self.part.shared is not None:
            gate_up, down = self.shared
            active = gated(gate_up(normed), activation=self.part.activation)
            given = torch.empty_like(lane.partial)
            down(active, given)
            gate = logits[:, self.part.num_experts] if self.part.shared.is_gated else None
        mix(results, weights, shared=given, gate=gate, out=lane.partial)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts int32 and their weights float32, both [rows, top_k]."""
        return route(
            logits,
            self.part.routing,
            num_experts=self.part.num_experts,
            correction=self.correction,
        )

    def gate(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, activation=self.part.activation, clamp=self.part.clamp)
