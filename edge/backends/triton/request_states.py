"""States of requests on the device: arrays of a fixed size in place of keys and values.

Kernels read and write a request's states in its own row, so a step needs no copy, and addresses
stay the same for CUDA graphs. A slot whose request is over has no row. Saved states are in rows
that belong to no slot.
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
    """The float32 states of all requests, zeros at first. Used from the compute thread."""

    def __init__(
        self, layout: ShardLayout, device: Device, *, requests: int, places: int = 0
    ) -> None:
        """requests: most with states at once. places: for saved states."""
        self._device = device
        shapes = [shape for part in layout.states.values() for shape in part.state_shapes]
        groups = list(dict.fromkeys(shapes))
        self._wholes = [
            torch.zeros((shapes.count(each), requests + places, *each), device=device.torch)
            for each in groups
        ]
        """The tensor for each shape, with its states one after the other. Rows of requests come
        first, then places."""
        self._place_of = [
            (groups.index(each), shapes[:number].count(each)) for number, each in enumerate(shapes)
        ]
        """The index of each state's tensor, and of the state within it."""
        states = iter(self._wholes[group][number] for group, number in self._place_of)
        self.layers: dict[int, tuple[Tensor, ...]] = {
            layer: tuple(next(states) for _ in part.state_shapes)
            for layer, part in layout.states.items()
        }
        """States of each layer, [rows, …] with the shapes of `state_shapes`."""
        self._requests = requests
        self._free = list(range(requests - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        """The row of each slot."""
        self._slots = Mirror(device, requests, torch.int32)
        self._known: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._wholes)

    @property
    def slots(self) -> Tensor:
        """The row of each entry of the step, int32 on the device, as set by `place`."""
        return self._slots.tensor

    def place(self, slots: Sequence[int]) -> None:
        """Copy the rows of a step's entries to the device."""
        if not self:
            return
        rows = [self._row_of[slot] for slot in slots]
        if self._known == rows:
            return
        self._known = rows
        self._slots.host[: len(rows)] = rows
        self._slots.to_device(0, len(rows))

    def open(self, slot: int) -> None:
        """Give a slot a row of zeros. Raises KeyError if all rows are taken."""
        if self:
            row = self._row(slot)
            for whole in self._wholes:
                whole[:, row].zero_()

    def drop(self, slot: int) -> None:
        """Free a slot's row."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def save(self, slot: int, place: int) -> None:
        for whole in self._wholes:
            whole[:, self._requests + place].copy_(whole[:, self._row_of[slot]])

    def load(self, slot: int, place: int) -> None:
        row = self._row(slot)
        for whole in self._wholes:
            whole[:, row].copy_(whole[:, self._requests + place])

    def _row(self, slot: int) -> int:
        if slot not in self._row_of:
            if not self._free:
                raise KeyError(f"all {self._requests} places for states are taken")
            self._row_of[slot] = self._free.pop()
        return self._row_of[slot]

    def read(self, first: int, count: int) -> list[Array]:
        """Copies of the states of `count` slots from `first`, each [count, …], in the order of
        layers. Waits for earlier launches."""
        if not self:
            return []
        return self._read([self._row_of[slot] for slot in range(first, first + count)])

    def read_place(self, place: int) -> list[Array]:
        """Copies of the states in a place, in the form of `read`."""
        return self._read([self._requests + place]) if self else []

    def new_arrays(self) -> list[Array]:
        """Arrays for the states of one slot, in the form of `read`."""
        shapes = [self._wholes[group].shape[2:] for group, _number in self._place_of]
        return [np.empty((1, *shape), np.float32) for shape in shapes]

    def _read(self, rows: Sequence[int]) -> list[Array]:
        wholes = [
            self._device.to_host(whole[:, list(rows)].clone()).numpy() for whole in self._wholes
        ]
        return [wholes[group][number] for group, number in self._place_of]

    def write(self, slot: int, states: Sequence[Array]) -> None:
        """Set a slot's states, in the form of `read` for one slot."""
        for (group, number), state in zip(self._place_of, states, strict=True):
            whole = self._wholes[group]
            whole[number, self._row(slot)].copy_(torch.from_numpy(state).view(whole.shape[2:]))
