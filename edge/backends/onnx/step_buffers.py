"""Buffers of a shard's graphs, made once for the largest step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.onnx.segments import gram_names, rotation_names
from edge.errors import RequestError
from edge.memory.step_memory import Widths, most_batched, most_logits, most_rows
from edge.models.rotary import AXES
from edge.models.spec import ModelSpec
from edge.protocol.step import Step, StepEntry, StepLimits
from edge.weights.layout import ShardLayout
from edge.weights.observation import observed_runs

_HALVES = 2

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The facts that bindings depend on: the first KV slot, the sizes of the step, and for one of
    two halves its number and its first row."""

    slot: int
    requests: int
    """Number of requests with the one that fills the step up, which have keys and values."""
    asked: int
    """The first size of arrays, without the request that fills the step up; see `Step.shape`."""
    batch: int
    """The first size of arrays."""
    tokens: int
    """The second size of arrays."""
    rows: int
    """Rows of logits, or of hidden states in a step with `states`."""
    states: bool
    half: int
    first_token: int
    first_row: int


def rows_of(flat: Array, size: int, batch: int, tokens: int, first_token: int = 0) -> Array:
    """A step's part [batch, tokens, size] of a buffer, from row `first_token` on."""
    return flat[first_token * size :][: batch * tokens * size].reshape(batch, tokens, size)


class StepBuffers:
    """Buffers for inputs and outputs of graphs, except side inputs, KV caches and experts' rows."""

    def __init__(self, spec: ModelSpec, layout: ShardLayout, limits: StepLimits) -> None:
        most = most_rows(limits)
        self._hidden_size = spec.hidden_size
        # Each segment reads one pair and writes the other, so no node sees its input change.
        self.hidden = _pair(most * spec.hidden_size)
        self.partial = _pair(most * spec.hidden_size * spec.partial_parts)
        self.tokens = np.zeros(most, np.int64)
        self.positions = np.zeros(most, np.int64)
        self._rows = np.zeros((_HALVES, limits.chunk_tokens), np.int64)
        self._head_rows = np.zeros((_HALVES, limits.chunk_tokens), np.int64)
        self._lengths = np.zeros((_HALVES, most_batched(limits)), np.int32)
        self._counts = np.zeros((_HALVES, most_batched(limits)), np.int32)
        self._total = np.zeros((_HALVES, 1), np.int32)
        self._totals = np.zeros((_HALVES, most_batched(limits)), np.int32)
        self._vocab_rows = len(layout.vocab)
        self._logits = np.zeros(most_batched(limits) * self._vocab_rows, np.float32)
        self._most_logits = most_logits(Widths.of_shard(spec, layout), limits)
        runs = observed_runs(layout) if limits.observes else ()
        self.grams = [np.zeros(run.shape, np.float32) for run in runs]
        """Sums over inputs of products, in the order of `observed_runs`."""
        self._of_all_steps: dict[str, NDArray[Any]] = {"sees_all": np.zeros((), np.bool_)}
        self.turns = np.zeros(most, np.int64)
        self._context_tokens = limits.context_tokens
        self._turned: list[tuple[NDArray[np.intp], tuple[Array, ...]]] = []
        """The axes of rotations that have some, and their tables. Behind the rows of positions
        these have one for each token of a step, for rows of pictures."""
        for number, rotation in enumerate(layout.rotations):
            tables = rotation.tables(limits.context_tokens)
            if rotation.axes:
                more = ((0, limits.chunk_tokens), (0, 0))
                cos, sin = (np.pad(table, more) for table in tables)
                tables = cos, sin
                self._turned.append((np.asarray(rotation.axes), tables))
            self._of_all_steps |= zip(rotation_names(number), tables, strict=True)
        for run, gram in zip(runs, self.grams, strict=True):
            self._of_all_steps |= dict.fromkeys(gram_names(run), gram)

    def make_room_for_logits(self, step: Step, batch: int) -> bool:
        """Returns whether the logits moved to a new buffer. batch: with the request that fills the
        step up.

        Raises RequestError for too many rows.
        """
        rows = 1 if step.states else max(step.head_rows, 1)
        needed = batch * rows * self._vocab_rows
        if needed > self._most_logits:
            raise RequestError(
                f"a step asks for too many rows of logits: {step.batch} x {step.logit_rows}",
                remedy="ask for fewer",
            )
        if needed <= self._logits.size:
            return False
        self._logits = np.zeros(needed, np.float32)
        return True

    def fill(self, parts: Sequence[Step], slot: int, *, fills_up: bool) -> list[StepShape]:
        """Fill the small inputs of a step or its halves; the shape names the bindings to use.

        The halves' rows follow each other in every buffer. fills_up: add a dummy request at its
        first token.
        """
        shapes: list[StepShape] = []
        first_token = first_row = 0
        for half, part in enumerate(parts):
            (asked, tokens), rows = part.shape, part.head_rows
            start = first_token
            for index, entry in enumerate(part.entries):
                end = start + len(entry.tokens)
                self.tokens[start:end] = entry.tokens
                self.positions[start:end] = np.arange(entry.position, entry.end)
                self._turn(entry, start)
                self._lengths[half, index] = entry.end - 1
                self._counts[half, index] = len(entry.tokens)
                self._totals[half, index] = entry.end
                start = end
            self._of_all_steps["sees_all"][()] = part.entries[-1].sees_all
            if fills_up:
                self.tokens[part.batch] = self.positions[part.batch] = self.turns[part.batch] = 0
                self._lengths[half, part.batch] = 0
                self._counts[half, part.batch] = 1
            if part.is_mixed:  # the last row of each request
                rows = part.batch
                self._rows[half, :rows] = np.cumsum(self._counts[half, :rows]) - 1
            else:
                self._rows[half, : max(rows, 1)] = np.arange(tokens - max(rows, 1), tokens)
            if part.states:
                self._head_rows[half, 0] = rows - 1
            else:
                self._head_rows[half, : max(rows, 1)] = np.arange(max(rows, 1))
            self._total[half] = max(entry.end for entry in part.entries)
            shapes.append(
                StepShape(
                    slot=slot,
                    requests=part.batch + fills_up,
                    asked=asked,
                    batch=asked + fills_up,
                    tokens=tokens,
                    rows=rows,
                    states=part.states,
                    half=half,
                    first_token=first_token,
                    first_row=first_row,
                )
            )
            first_token, first_row = first_token + tokens, first_row + rows
        return shapes

    def _turn(self, entry: StepEntry, start: int) -> None:
        """Set the rows of rotary tables for an entry's tokens, from row `start` of the step on."""
        places = slice(start, start + len(entry.tokens))
        if not entry.turns:
            self.turns[places] = self.positions[places] - entry.shift
            return
        own = np.arange(self._context_tokens + places.start, self._context_tokens + places.stop)
        self.turns[places] = own
        turns = np.asarray(entry.turns).reshape(AXES, -1)
        for axes, tables in self._turned:
            for table in tables:
                table[own] = table[turns[axes].T, np.arange(len(axes))]

    def arrays(
        self, shape: StepShape, index: int, *, parts_before: int, parts: int
    ) -> dict[str, NDArray[Any]]:
        """Arrays by input or output of segment `index`. parts_before, parts: hidden states side by
        side in the sums before and after it."""
        size, read, write = self._hidden_size, index % 2, (index + 1) % 2
        batch, tokens, first = shape.batch, shape.tokens, shape.first_token
        place = batch, tokens, first
        rows = max(shape.rows, 1)  # a graph that ends in the head computes at least one
        head_rows, first_head_row = (1, 0) if shape.states else (rows, shape.first_row)
        return {
            "tokens": self.tokens[first : first + batch * tokens].reshape(batch, tokens),
            "positions": self.positions[first : first + batch * tokens].reshape(batch, tokens),
            "turns": self.turns[first : first + batch * tokens].reshape(batch, tokens),
            "rows": self._rows[shape.half, :rows],
            "head_rows": self._head_rows[shape.half, :head_rows],
            "hidden": rows_of(self.hidden[read], size, *place),
            "partial": rows_of(self.partial[read], parts_before * size, *place),
            "hidden_out": rows_of(self.hidden[write], size, *place),
            "partial_out": rows_of(self.partial[write], parts * size, *place),
            "states": rows_of(self.hidden[write], size, batch, rows, shape.first_row),
            "logits": self.logits(batch, head_rows, first_head_row),
            "lengths": self._lengths[shape.half, : shape.requests],
            "counts": self._counts[shape.half, : shape.requests],
            "total": self._total[shape.half].reshape(()),
            **self._of_all_steps,
        }

    def arrays_of_requests(self, shape: StepShape) -> dict[str, NDArray[Any]]:
        """Arrays by input, of graphs that are lowered for a number of requests."""
        arrays: dict[str, NDArray[Any]] = {}
        for number in range(shape.batch):
            first = shape.first_token + number * shape.tokens
            arrays |= {
                f"lengths.{number}": self._lengths[shape.half, number : number + 1],
                f"total.{number}": self._totals[shape.half, number : number + 1].reshape(()),
                f"positions.{number}": self.positions[None, first : first + shape.tokens],
                f"turns.{number}": self.turns[None, first : first + shape.tokens],
            }
        return arrays

    def logits(self, batch: int, rows: int, first_row: int = 0) -> Array:
        """Logits [batch, rows, vocab], from row `first_row` on."""
        return rows_of(self._logits, self._vocab_rows, batch, rows, first_row)


def _pair(size: int) -> tuple[Array, Array]:
    return np.zeros(size, np.float32), np.zeros(size, np.float32)
