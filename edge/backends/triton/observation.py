"""Sums over the inputs of a shard's products, on the device; see `edge.weights.observation`."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.triton.device import Device
from edge.weights.layout import ShardLayout
from edge.weights.observation import ObservedExperts, ObservedRun, observed_runs


class Grams:
    """Gram matrices of a shard's runs, or counts of tokens of its experts."""

    def __init__(self, layout: ShardLayout, device: Device) -> None:
        runs = observed_runs(layout)
        self._sums = [torch.zeros(run.shape, device=device.torch) for run in runs]
        self._of_matrix: dict[str, list[tuple[ObservedRun, Tensor]]] = defaultdict(list)
        self._of_layer: dict[int, Tensor] = {}
        for run, total in zip(runs, self._sums, strict=True):
            if isinstance(run, ObservedExperts):
                self._of_layer[run.layer] = total
            else:
                self._of_matrix[run.matrix].append((run, total))

    def add(self, matrix: str, x: Tensor) -> None:
        """x: [rows, inputs], without padding."""
        for run, total in self._of_matrix[matrix]:
            part = x[:, run.inputs].float()
            total.addmm_(part.T, part)

    def count(self, layer: int, chosen: Tensor) -> None:
        """chosen [rows, top_k]: experts of the layer."""
        numbers = chosen.reshape(-1).long()
        ones = torch.ones(numbers.shape, device=numbers.device)
        self._of_layer[layer].scatter_add_(0, numbers, ones)

    def array(self, run: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._sums[run].cpu().numpy()
        return found

    def clear(self) -> None:
        for total in self._sums:
            total.zero_()
