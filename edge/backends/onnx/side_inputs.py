"""Side inputs of a stage: inputs of layers that later layers need again, which are sent with the
hidden state; token embeddings, per-layer token inputs, and what layers add to rows of pictures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.backends.embedding_rows import EmbeddingRows
from edge.backends.onnx.step_buffers import StepBuffers, StepShape, rows_of
from edge.memory.step_memory import most_rows
from edge.models.spec import ModelSpec
from edge.protocol.step import StepLimits
from edge.weights.layout import ShardLayout

Array = NDArray[np.float32]


class SideInputs:
    """Buffers of side inputs, made once for the largest step. Empty for most models."""

    def __init__(self, spec: ModelSpec, layout: ShardLayout, limits: StepLimits) -> None:
        most = most_rows(limits)
        self._hidden_size = spec.hidden_size
        self._layout = layout
        before, behind = layout.kept_before, layout.kept_behind
        self._kept = {
            layer: np.zeros(most * spec.hidden_size, np.float32)
            for layer in (*before, *layout.layers)
            if layer in before or layer in spec.lenders
        }
        """Inputs of layers that other layers need, by layer."""
        parts = 1 + max(len(before), len(behind))
        self._handed = np.zeros(most * spec.hidden_size * parts * (parts > 1), np.float32)
        """The hidden state between stages, with the side inputs beside it."""
        of_tokens = bool(layout.token_columns)
        self._embedded = np.zeros(most * spec.hidden_size * of_tokens, np.float32)
        self._of_pictures = spec.of_pictures(layout.layers)
        self._picture_rows = np.zeros((len(self._of_pictures), most * spec.hidden_size), np.float32)
        """By layer; zeros except in a step with rows of pictures."""
        self._has_picture_rows = False
        self._token_rows = np.zeros((len(layout.layers), most, spec.token_inputs), np.float32)

    def handed(self, batch: int, tokens: int) -> Array | None:
        """The buffer for a stage's input [batch, tokens, columns]; None: the hidden state's."""
        before = len(self._layout.kept_before)
        if not before:
            return None
        return rows_of(self._handed, (1 + before) * self._hidden_size, batch, tokens)

    def take_apart(self, received: Array, hidden: Array) -> None:
        """Copy the received hidden state and side inputs into the buffers of the graphs."""
        batch, tokens, _ = received.shape
        arrays = [hidden, *(self._kept[each] for each in self._layout.kept_before)]
        for array, part in zip(arrays, np.split(received, len(arrays), axis=-1), strict=True):
            rows_of(array, self._hidden_size, batch, tokens)[...] = part

    def put_together(self, hidden: Array) -> Array:
        """The hidden state with the side inputs that later stages need."""
        behind, size = self._layout.kept_behind, self._hidden_size
        if not behind:
            return hidden
        batch, tokens, _ = hidden.shape
        handed = rows_of(self._handed, (1 + len(behind)) * size, batch, tokens)
        kept = (rows_of(self._kept[each], size, batch, tokens) for each in behind)
        return np.concatenate([hidden, *kept], axis=-1, out=handed)

    def look_up(
        self, tables: EmbeddingRows, buffers: StepBuffers, rows: int, *, has_pictures: bool
    ) -> None:
        """Read the table rows of the first `rows` tokens from disk. The embedding's rows are the
        first stage's hidden state. has_pictures: it has rows of pictures."""
        is_first, tokens = self._layout.is_first_stage, buffers.tokens[:rows]
        hidden = buffers.hidden[0] if is_first else self._embedded
        flat = hidden[: rows * self._hidden_size]
        tables.read_into(
            flat.reshape(rows, -1),
            tokens,
            buffers.positions[:rows],
            has_pictures=has_pictures and is_first,
        )
        if self._layout.token_columns:
            if is_first:
                self._embedded[: len(flat)] = flat
            tables.read_layers_into(self._token_rows, 0, tokens)

    def picture_rows(self, batch: int, tokens: int) -> Array:
        """See StageCompute. Zeros again after `forget_picture_rows`."""
        self._has_picture_rows = True
        rows = self._picture_rows[:, : batch * tokens * self._hidden_size]
        return rows.reshape(-1, batch, tokens, self._hidden_size)

    def forget_picture_rows(self) -> None:
        """Called after each step."""
        if self._has_picture_rows:
            self._picture_rows.fill(0)
            self._has_picture_rows = False

    def arrays(self, shape: StepShape) -> dict[str, Array]:
        """Arrays by the name of a graph's input or output."""
        batch, tokens, first = shape.batch, shape.tokens, shape.first_token
        place = self._hidden_size, batch, tokens, first
        arrays: dict[str, Array] = {}
        for layer, kept in self._kept.items():
            view = rows_of(kept, *place)
            arrays |= {f"kept_{layer}": view, f"kept_out_{layer}": view}
        for layer, flat in zip(self._of_pictures, self._picture_rows, strict=True):
            arrays[f"picture_rows_{layer}"] = rows_of(flat, *place)
        if self._layout.token_columns:
            arrays["embedded"] = rows_of(self._embedded, *place)
            some = self._token_rows[:, first : first + batch * tokens]
            for layer, rows in zip(self._layout.layers, some, strict=True):
                arrays[f"token_rows_{layer}"] = rows.reshape(batch, tokens, -1)
        return arrays
