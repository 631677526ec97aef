"""Buffers of a step, made once: inputs and outputs of a program's kernels.

They fit the largest step. CUDA graphs need the same addresses every time, and copies between host
and device need pinned memory, which is slow to allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.backends.triton.device import Device, Mirror, rows_of
from edge.models.pictures import is_row
from edge.protocol.step import Step, StepLimits

_LANES = 2
"""Most lanes of a step: its two halves."""

_SMALLEST_KEYS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A step or one half of it, in the form for kernels. The halves' rows follow each other.

    hidden and partial float32 [rows, hidden size]; tokens, positions and sequences int32 [rows];
    starts int32 [batch + 1] and lengths int32 [batch] as `attention` takes them.
    """

    batch: int
    num_tokens: int
    """Tokens of each entry."""
    logit_rows: int
    """Rows of logits of each entry."""
    states: bool
    """Whether these rows are the head's inputs, in `hidden`, instead of logits."""
    max_keys: int
    """A bound on the keys of each query, with few values, because kernels are chosen by it."""
    first_row: int
    hidden: Tensor
    partial: Tensor
    """A product that is not yet added to `hidden`."""
    tokens: Tensor
    positions: Tensor
    sequences: Tensor
    starts: Tensor
    lengths: Tensor
    logits: Tensor
    """[batch · logit_rows, columns]"""

    @property
    def num_rows(self) -> int:
        return self.batch * self.num_tokens

    @property
    def last_rows(self) -> slice:
        """The rows of logits or hidden states: the last ones of one entry, or one of each entry."""
        return slice(self.num_rows - self.batch * self.logit_rows, self.num_rows)

    @property
    def key(self) -> tuple[int, int, bool, int] | None:
        """Key of a CUDA graph, equal for the same kernels and memory; None for rare steps."""
        if self.num_tokens > 1 or self.first_row:
            return None
        return self.batch, self.logit_rows, self.states, self.max_keys


class StepBuffers:
    """Host and device memory for steps within `limits`."""

    def __init__(
        self, device: Device, limits: StepLimits, *, hidden_size: int, columns: int
    ) -> None:
        """columns: number of the shard's logits."""
        self._device = device
        self._limits = limits
        self._hidden_size, self._columns = hidden_size, columns
        self._most = max(limits.chunk_tokens, limits.requests)
        self.hidden = Mirror(device, self._most * hidden_size, torch.float32)
        self.partial = Mirror(device, self._most * hidden_size, torch.float32)
        self.logits = Mirror(device, limits.requests * columns, torch.float32)
        lane_integers = 3 * self._most + 2 * limits.requests + 1
        self._integers = Mirror(device, _LANES * lane_integers, torch.int32)

    def make_room_for_logits(self, step: Step) -> bool:
        """Returns whether a larger buffer was made."""
        needed = step.batch * step.logit_rows * self._columns * (not step.states)
        if needed <= len(self.logits):
            return False
        self.logits = Mirror(self._device, needed, torch.float32)
        return True

    def lanes(self, parts: Sequence[Step]) -> list[Lane]:
        """Fill in the small inputs of a step or its halves, and send them to the device."""
        lanes: list[Lane] = []
        row = logit_row = 0
        for number, part in enumerate(parts):
            lanes.append(self._lane(number, part, row, logit_row))
            row += part.batch * part.num_tokens
            logit_row += part.batch * part.logit_rows
        used = len(parts) * (len(self._integers) // _LANES)
        self._integers.to_device(0, used)
        return lanes

    def host_rows(self, mirror: Mirror, lane: Lane) -> NDArray[Any]:
        """A lane's rows [batch, tokens, hidden size] of `hidden` or `partial`, on the host."""
        start, stop = self.span(lane)
        rows: NDArray[Any] = mirror.host[start:stop]
        return rows.reshape(lane.batch, lane.num_tokens, self._hidden_size)

    def span(self, lane: Lane) -> tuple[int, int]:
        """The range of a lane in `hidden` and `partial`."""
        size = self._hidden_size
        return lane.first_row * size, (lane.first_row + lane.num_rows) * size

    def _lane(self, number: int, part: Step, first_row: int, first_logit_row: int) -> Lane:
        most, requests = self._most, self._limits.requests
        batch, tokens = part.batch, part.num_tokens
        count = batch * tokens
        host, device = self._integers.host, self._integers.tensor
        start = number * (len(self._integers) // _LANES)
        at_positions, at_sequences = start + most, start + 2 * most
        at_starts = start + 3 * most
        at_lengths = at_starts + requests + 1
        for index, entry in enumerate(part.entries):
            first = index * tokens
            ids = [0 if is_row(each) else each for each in entry.tokens]  # looked up on the host
            host[start + first : start + first + tokens] = ids
            host[at_positions + first : at_positions + first + tokens] = np.arange(
                entry.position, entry.end
            )
            host[at_sequences + first : at_sequences + first + tokens] = index
            host[at_starts + index] = first
            host[at_lengths + index] = entry.end
        host[at_starts + batch] = count
        size = self._hidden_size
        return Lane(
            batch=batch,
            num_tokens=tokens,
            logit_rows=part.logit_rows,
            states=part.states,
            max_keys=self._bound(max(entry.end for entry in part.entries)),
            first_row=first_row,
            hidden=rows_of(self.hidden.tensor, first_row, count, size),
            partial=rows_of(self.partial.tensor, first_row, count, size),
            tokens=device[start : start + count],
            positions=device[at_positions : at_positions + count],
            sequences=device[at_sequences : at_sequences + count],
            starts=device[at_starts : at_starts + batch + 1],
            lengths=device[at_lengths : at_lengths + batch],
            logits=rows_of(
                self.logits.tensor,
                0 if part.states else first_logit_row,
                0 if part.states else batch * part.logit_rows,
                self._columns,
            ),
        )

    def _bound(self, keys: int) -> int:
        bound = _SMALLEST_KEYS
        while bound < keys:
            bound *= 2
        return min(bound, max(keys, self._limits.context_tokens))
