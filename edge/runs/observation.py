"""Gathers observations from the shards of a model: input statistics, or uses of experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from edge.models.spec import ModelSpec
from edge.runs.copied_model import CopiedModel
from edge.runs.model import RunningModel
from edge.weights.layout import ShardLayout, shard_layout, whole_layout
from edge.weights.observation import (
    RUN_COLUMNS,
    Observed,
    ObservedExperts,
    ObservedRun,
    observed_runs,
)


async def gather_observed(
    model: RunningModel | CopiedModel, spec: ModelSpec
) -> AsyncIterator[tuple[Observed, NDArray[np.float32]]]:
    """The Gram matrices of all input runs of the whole model; for layers of experts, the tokens
    that each expert got, by its number.

    Products between inputs on different shards are unknown and stay 0.
    """
    seats = [
        (stage, rank)
        for stage, each in enumerate(model.plan.stages)
        for rank in range(len(each.shards))
    ]
    parts = defaultdict(list)
    counted: set[int] = set()
    for stage, rank in seats:
        layout = shard_layout(spec, model.plan, stage=stage, rank=rank)
        for number, run in enumerate(observed_runs(layout)):
            if isinstance(run, ObservedRun):
                key = run.matrix, run.columns.start // RUN_COLUMNS
                parts[key].append(((stage, rank), number, run))
            elif run.layer not in counted:  # shards of a stage choose the same experts
                counted.add(run.layer)
                uses = await model.observed((stage, rank), number, run.shape)
                yield run, _by_number(uses, layout, run)
    for whole in observed_runs(whole_layout(spec)):
        if isinstance(whole, ObservedExperts):
            continue
        gram = np.zeros(whole.shape, np.float32)
        known: set[range] = set()
        for seat, number, run in parts[whole.matrix, whole.columns.start // RUN_COLUMNS]:
            if run.columns in known:  # shards cut by rows have the same inputs
                continue
            known.add(run.columns)
            start = run.columns.start - whole.columns.start
            place = slice(start, start + len(run.columns))
            gram[place, place] = await model.observed(seat, number, run.shape)
        yield whole, gram


def _by_number(
    uses: NDArray[np.float32], layout: ShardLayout, run: ObservedExperts
) -> NDArray[np.float32]:
    """Uses by expert number, from uses by place in the shard, mapped by the router's rows."""
    router = layout.matrix(f"layers.{run.layer}.router")
    numbers = [row for _role, rows in router.parts for row in rows][: run.num_experts]
    found = np.zeros_like(uses)
    found[numbers] = uses
    return found
