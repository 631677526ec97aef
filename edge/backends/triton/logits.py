"""Logits on the device, where the best are found; only those are copied to the host.

A token has up to hundreds of thousands of logits, and greedy decoding needs one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge.backends.triton.device import Device, Mirror
from edge.kernels.sampling.triton import LARGEST_TOP_K, top_k
from edge.protocol.step import Step


class DeviceLogits:
    """See Logits."""

    can_rank = True

    def __init__(
        self,
        device: Device,
        logits: Mirror,
        step: Step,
        columns: int,
        states: Callable[[], NDArray[np.float32]],
    ) -> None:
        """logits: flat [batch, logit_rows, columns]; empty for a step with `states`."""
        self._device = device
        self._logits = logits
        rows = 0 if step.states else step.logit_rows
        self._shape = (step.batch, rows, columns)
        self._count = step.batch * rows * columns
        self.states = states
        self._is_on_host = False

    def array(self) -> NDArray[np.float32]:
        if not self._is_on_host:
            self._logits.to_host(0, self._count)
            self._device.synchronize()
            self._is_on_host = True
        found: NDArray[np.float32] = self._logits.host[: self._count]
        return found.reshape(self._shape)

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        if not 1 <= count <= min(LARGEST_TOP_K, self._shape[-1]) or not self._count:
            return None
        rows = self._logits.tensor[: self._count].view(self._shape)[:, -1]
        with self._device.launching():
            scores, columns = top_k(rows, count)
        found: NDArray[np.int64] = self._device.to_host(columns).numpy()
        return found, self._device.to_host(scores).numpy()
