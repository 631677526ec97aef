"""What layers have of each request in place of keys and values: states of one size, on the device.

Kernels read and write a request's states where they lie, in its slot, so a step of any requests
needs no copy, and the addresses stay as CUDA graphs want them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.triton.device import Device, Mirror
from edge.weights.layout import ShardLayout

Array = NDArray[np.float32]


class RequestStates:
    """float32, zeros at first. Used from the compute thread."""

    def __init__(self, layout: ShardLayout, device: Device, *, slots: int) -> None:
        self._device = device
        shapes = [shape for part in layout.states.values() for shape in part.state_shapes]
        groups = list(dict.fromkeys(shapes))
        self._wholes = [
            torch.zeros((shapes.count(each), slots, *each), device=device.torch) for each in groups
        ]
        """For each shape: the states that have it, one behind the other."""
        self._place_of = [
            (groups.index(each), shapes[:number].count(each)) for number, each in enumerate(shapes)
        ]
        """For each state: which of these, and where in it."""
        states = iter(self._wholes[group][number] for group, number in self._place_of)
        self.layers: dict[int, tuple[Tensor, ...]] = {
            layer: tuple(next(states) for _ in part.state_shapes)
            for layer, part in layout.states.items()
        }
        """Those of each layer that has some, [slots, …] as `state_shapes` says."""
        self._slots = Mirror(device, slots, torch.int32)
        self._known: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._wholes)

    @property
    def slots(self) -> Tensor:
        """int32 on the device: of each entry of the step, as `place` was told."""
        return self._slots.tensor

    def place(self, slots: Sequence[int]) -> None:
        """Of a step's entries."""
        if not self or self._known == slots:
            return
        self._known = list(slots)
        self._slots.host[: len(slots)] = slots
        self._slots.to_device(0, len(slots))

    def clear(self, slot: int) -> None:
        for whole in self._wholes:
            whole[:, slot].zero_()

    def read(self, first: int, count: int) -> list[Array]:
        """Of `count` slots from `first`, each [count, …], in the order of layers. Copies; waits for
        what was launched before."""
        wholes = [
            self._device.to_host(whole[:, first : first + count].clone()).numpy()
            for whole in self._wholes
        ]
        return [wholes[group][number] for group, number in self._place_of]

    def write(self, slot: int, states: Sequence[Array]) -> None:
        """As `read` gives them of one slot."""
        for (group, number), state in zip(self._place_of, states, strict=True):
            whole = self._wholes[group]
            whole[number, slot].copy_(torch.from_numpy(state).view(whole.shape[2:]))
