"""A sample of a model, loaded on a peer's back end, and the time of its steps."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.interface import Backend
from edge.profiling.random_weights import written_weights
from edge.profiling.sample import REQUESTS, Sample, Width
from edge.protocol.step import Step, StepEntry
from edge.transport import BackgroundWork, SoloCollective
from edge.weights.formats import WeightFormat

EARLY_POSITION = 15
"""Position of decoded tokens whose attention costs almost nothing."""

Check = Callable[[], None]
"""Raises if the measurement was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Place and means of a measurement."""

    backend: Backend
    folder: Path
    """Folder for temporary weights."""
    budget_bytes: int
    """Memory that may be used."""
    disk_bytes_per_s: float | None
    check: Check


class LoadedSample:
    """A sample on the back end, with random weights. `close` frees it."""

    def __init__(
        self,
        site: Site,
        sample: Sample,
        width: Width,
        weight_format: WeightFormat,
        *,
        is_streamed: bool = False,
    ) -> None:
        """is_streamed: its layers are on disk, and memory holds all of their experts.

        Raises StoreError if the disk has no room.
        """
        layout = sample.layout(width, weight_format)
        if is_streamed:
            layout = dataclasses.replace(
                layout, streamed_layers=len(layout.layers), kept_experts=sample.num_experts
            )
        self.sample = sample
        self.nbytes = sample.nbytes(width, weight_format)
        self.runs = Runs()
        self._ends: dict[str, int] = {}
        """Tokens of each request so far, if layers have states."""
        with contextlib.ExitStack() as stack:
            weights = stack.enter_context(
                written_weights(layout, weight_format, site.folder, packs=True)
            )
            self._program = site.backend.load(
                sample.spec, layout, weights, weight_format, limits=sample.limits
            )
            # Packed weights are read again if they are on disk.
            self._files = stack.pop_all() if is_streamed else contextlib.ExitStack()
        rows = max(sample.chunk_rows, REQUESTS)
        shape = (rows, sample.spec.hidden_size)
        self._hidden = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

    def seconds(self, step: Step) -> float:
        """Seconds of one run of the step. `runs` then has the time of each graph run."""
        if self.sample.spec.has_states:
            step = self._in_order(step)
        shape = (step.batch, step.num_tokens, self.sample.spec.hidden_size)
        hidden = self._hidden[: step.batch * step.num_tokens].reshape(shape)
        self.runs.begin()
        self._program.forward(step, hidden, self.runs)
        return self.runs.end()

    def _in_order(self, step: Step) -> Step:
        """The step with each request's next tokens: a state depends on all tokens so far."""
        entries = []
        for entry in step.entries:
            position = self._ends.get(entry.request, 0)
            if position + len(entry.tokens) > self.sample.context_tokens:
                self._program.release(entry.request)
                position = 0
            entries.append(dataclasses.replace(entry, position=position))
            self._ends[entry.request] = entries[-1].end
        return dataclasses.replace(step, entries=tuple(entries))

    def close(self) -> None:
        self._program.close()
        self._files.close()


class Runs(SoloCollective):
    """A group of one that records the times of its sums: one graph runs between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[float] = []

    def begin(self) -> None:
        self._marks = [time.perf_counter()]

    def all_reduce(self, array: NDArray[Any]) -> None:
        self._marks.append(time.perf_counter())

    def begin_all_reduce(self, array: NDArray[Any]) -> BackgroundWork:
        self.all_reduce(array)
        return super().begin_all_reduce(array)

    def end(self) -> float:
        self._marks.append(time.perf_counter())
        return self._marks[-1] - self._marks[0]

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._marks)]


def decode_step(rows: int, position: int = EARLY_POSITION) -> Step:
    """A step of one token for each of `rows` requests."""
    return Step(
        entries=tuple(
            StepEntry(request=str(number), position=position, tokens=(0,), logit_rows=0)
            for number in range(rows)
        )
    )


def chunk_step(rows: int, position: int = 0) -> Step:
    """A step of `rows` tokens of one request."""
    entry = StepEntry(request="0", position=position, tokens=(0,) * rows, logit_rows=0)
    return Step(entries=(entry,))
