"""What a loaded model's products were given, gathered from its shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from edge.coordinator.lasting_model import LastingModel
from edge.models.spec import ModelSpec
from edge.weights.layout import shard_layout, whole_layout
from edge.weights.observation import RUN_COLUMNS, ObservedRun, observed_runs


async def gather_grams(
    model: LastingModel, spec: ModelSpec
) -> AsyncIterator[tuple[ObservedRun, NDArray[np.float32]]]:
    """The Gram matrices of all runs of the whole model's inputs.

    Inputs that different shards have are not known to each other: their products stay 0.
    """
    seats = [
        (stage, rank)
        for stage, each in enumerate(model.plan.stages)
        for rank in range(len(each.shards))
    ]
    parts = defaultdict(list)
    for stage, rank in seats:
        layout = shard_layout(spec, model.plan, stage=stage, rank=rank)
        for number, run in enumerate(observed_runs(layout)):
            parts[run.matrix, run.columns.start // RUN_COLUMNS].append(((stage, rank), number, run))
    for whole in observed_runs(whole_layout(spec)):
        gram = np.zeros(whole.shape, np.float32)
        known: set[range] = set()
        for seat, number, run in parts[whole.matrix, whole.columns.start // RUN_COLUMNS]:
            if run.columns in known:  # what is cut by rows is given the very same
                continue
            known.add(run.columns)
            start = run.columns.start - whole.columns.start
            place = slice(start, start + len(run.columns))
            gram[place, place] = await model.gram(seat, number, len(run.columns))
        yield whole, gram
