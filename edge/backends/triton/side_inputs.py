"""Side inputs of a stage, sent with the hidden state: inputs of layers that later layers need
again, token embeddings, and per-layer token inputs.

Each has a buffer, made once for the largest step, in which a lane's rows follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.triton.buffers import Lane
from edge.backends.triton.device import Device, Mirror, rows_of
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout

Array = NDArray[np.float32]


class SideInputs:
    """Float32 buffers of side inputs on the device and on the host. Empty for most models."""

    def __init__(
        self, spec: ModelSpec, layout: ShardLayout, limits: StepLimits, device: Device
    ) -> None:
        self._hidden_size = spec.hidden_size
        self._layout = layout
        most = max(limits.chunk_tokens, limits.requests)
        size = most * spec.hidden_size
        before, behind = layout.kept_before, layout.kept_behind
        own = [layer for layer in layout.layers if layer in spec.lenders]
        self._kept = {layer: Mirror(device, size, torch.float32) for layer in (*before, *own)}
        parts = 1 + max(len(before), len(behind))
        self._handed = np.zeros(size * parts * (parts > 1), np.float32)
        """The hidden state between stages, with the side inputs beside it."""
        has_tokens = bool(layout.token_columns)
        self._embedded = Mirror(device, size * has_tokens, torch.float32)
        self._of_tokens = (most, len(layout.layers), spec.token_inputs)
        self._token_rows = Mirror(device, most * len(layout.token_columns), torch.float32)

    def handed(self, batch: int, tokens: int) -> Array | None:
        """The buffer for a stage's input [batch, tokens, columns]; None: the hidden state's."""
        before = self._layout.kept_before
        return self._view(batch, tokens, parts=1 + len(before)) if before else None

    def take_apart(self, received: Array, hidden: Array) -> None:
        """Copy the received hidden state to `hidden` on the host, and the rest to the device."""
        first, *others = np.split(received, 1 + len(self._layout.kept_before), axis=-1)
        hidden[...] = first
        for layer, part in zip(self._layout.kept_before, others, strict=True):
            mirror = self._kept[layer]
            mirror.host[: part.size] = part.reshape(-1)
            mirror.to_device(0, part.size)

    def to_host(self, count: int) -> None:
        """Copy `count` values of each input that later stages need. Synchronize before use."""
        for layer in self._layout.kept_behind:
            self._kept[layer].to_host(0, count)

    def put_together(self, hidden: Array) -> Array:
        """The hidden state with the side inputs that later stages need, on the host."""
        behind = self._layout.kept_behind
        if not behind:
            return hidden
        handed = self._view(*hidden.shape[:2], parts=1 + len(behind))
        kept = (self._kept[each].host[: hidden.size].reshape(hidden.shape) for each in behind)
        return np.concatenate([hidden, *kept], axis=-1, out=handed)

    def look_up(
        self, tables: EmbeddingRows, tokens: NDArray[np.int64], hidden: Array | None
    ) -> None:
        """Look up per-layer inputs of these tokens, and their embedding unless it is `hidden`."""
        if not self._layout.token_columns:
            return
        count = len(tokens)
        embedded = self._embedded.host[: count * self._hidden_size]
        if hidden is None:
            tables.read_into(embedded.reshape(count, -1), tokens)
        else:
            embedded[...] = hidden.reshape(-1)
        self._embedded.to_device(0, embedded.size)
        rows = self._token_rows.host.reshape(self._of_tokens)
        tables.read_layers_into(rows.transpose(1, 0, 2), 0, tokens)
        self._token_rows.to_device(0, count * rows[0].size)

    def keeps(self, layer: int) -> bool:
        """Whether other layers need this layer's input."""
        return layer in self._kept

    def kept(self, layer: int, lane: Lane) -> Tensor:
        """The lane's rows of that layer's input."""
        return self._rows(self._kept[layer], lane)

    def embedded(self, lane: Lane) -> Tensor:
        return self._rows(self._embedded, lane)

    def token_rows(self, layer: int, lane: Lane) -> Tensor:
        """The lane's token inputs of a layer: [rows, n], not contiguous."""
        rows = self._token_rows.tensor.view(self._of_tokens)
        number = layer - self._layout.layers.start
        return rows[lane.first_row : lane.first_row + lane.num_rows, number]

    def _rows(self, mirror: Mirror, lane: Lane) -> Tensor:
        return rows_of(mirror.tensor, lane.first_row, lane.num_rows, self._hidden_size)

    def _view(self, *leading: int, parts: int) -> Array:
        shape: Sequence[Any] = (*leading, parts * self._hidden_size)
        found: Array = self._handed[: int(np.prod(shape))].reshape(shape)
        return found
