"""Building blocks of a layer's parts on a GPU: norms, addends, and the builder of blocks.

A block launches the kernels of one part of a layer; each kind of part has its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from edge.backends.shard_arrays import ShardArrays
from edge.backends.triton.buffers import Lane
from edge.backends.triton.device import Device
from edge.backends.triton.expert_products import ExpertProducts
from edge.backends.triton.paged_kv_cache import BlockCache
from edge.backends.triton.side_inputs import SideInputs
from edge.backends.triton.tuning import Tuning
from edge.backends.triton.weights import Product, to_device
from edge.kernels.layer_norm.triton import add_layer_norm, layer_norm
from edge.kernels.rms_norm.triton import add_rms_norm, rms_norm
from edge.models.rotary import Rotary
from edge.models.spec import ModelSpec


class Block(Protocol):
    """One part of a layer."""

    @property
    def norm(self) -> Norm | Cast: ...

    def launch(self, normed: Tensor, lane: Lane) -> None:
        """Leave the addend of the residual stream in `lane.partial`."""
        ...


class Norm:
    """The norm of the residual stream before products: LayerNorm with a bias, else RMSNorm."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, epsilon: float, activations: torch.dtype
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._epsilon = epsilon
        self._activations = activations

    def __call__(self, hidden: Tensor, addend: Tensor | None) -> Tensor:
        """Norm `hidden`, after adding the addend, if there is one, in place."""
        out = torch.empty(hidden.shape, dtype=self._activations, device=hidden.device)
        weight, bias, epsilon = self._weight, self._bias, self._epsilon
        if addend is None:
            if bias is None:
                return rms_norm(hidden, weight, epsilon=epsilon, out=out)
            return layer_norm(hidden, weight, bias, epsilon=epsilon, out=out)
        if bias is None:
            add_rms_norm(hidden, addend, weight, epsilon=epsilon, out=out, total=hidden)
        else:
            add_layer_norm(hidden, addend, weight, bias, epsilon=epsilon, out=out, total=hidden)
        return out


class Cast:
    """The residual stream before products, without a norm."""

    def __init__(self, activations: torch.dtype) -> None:
        self._activations = activations

    def __call__(self, hidden: Tensor, addend: Tensor | None) -> Tensor:
        """See Norm."""
        if addend is not None:
            hidden.add_(addend)
        return hidden.to(self._activations)


class Addend:
    """A product that is not yet added to the residual stream. It may be normed before, and the sum
    may be multiplied by a factor."""

    def __init__(self, weight: Tensor | None, scale: Tensor | None, epsilon: float) -> None:
        self.weight = weight
        self._scale = scale
        self._epsilon = epsilon

    def settle(self, lane: Lane, hidden: Tensor) -> Tensor | None:
        """The addend of `hidden`. A scaled sum is computed at once, and None returned."""
        added = self(lane)
        if self._scale is None:
            return added
        hidden.add_(added).mul_(self._scale)
        return None

    def __call__(self, lane: Lane) -> Tensor:
        """The addend, normed if need be, in the shape of `lane.partial`."""
        if self.weight is None:
            return lane.partial
        return rms_norm(lane.partial, self.weight, epsilon=self._epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBuilder:
    """The weights, tables and settings that the blocks of a shard are made from."""

    spec: ModelSpec
    arrays: ShardArrays
    device: Device
    cache: BlockCache
    side: SideInputs
    tuning: Tuning
    activations: torch.dtype
    tables: dict[Rotary, tuple[Tensor, Tensor]]
    """Cosines and sines."""
    product: Callable[[str], Product]
    """Makes a layer's product, whose weights may move."""
    experts: Callable[[Sequence[str], Tensor | None], ExpertProducts]
    """Makes the products with these experts' matrices and biases [experts, outputs]."""

    def norm(self, name: str) -> Norm | Cast:
        if name not in self.arrays:
            return Cast(self.activations)
        bias = self.vector(f"{name}_bias") if f"{name}_bias" in self.arrays else None
        return Norm(self.vector(name), bias, self.spec.norm_epsilon, self.activations)

    def addend(self, name: str, scale: str = "") -> Addend:
        """An addend. name, scale: of its norm and its factor, if the model has them."""
        weight, number = (
            self.vector(each) if each in self.arrays else None for each in (name, scale)
        )
        return Addend(weight, number, self.spec.norm_epsilon)

    def vector(self, name: str) -> Tensor:
        return to_device(self.arrays.read(name), self.device)
